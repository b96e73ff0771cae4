// Dark or light: as the system has it, until one is chosen. Runs before the page is drawn, so it is no module.

(() => {
  const KEY = "pyggml.theme";
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const chosen = () => localStorage.getItem(KEY);
  const show = () => {
    document.documentElement.dataset.theme = chosen() ?? (dark.matches ? "dark" : "light");
  };
  show();
  dark.addEventListener("change", show);
  addEventListener("storage", show);
  window.switchTheme = () => {
    const other = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
    if (other === (dark.matches ? "dark" : "light")) localStorage.removeItem(KEY);
    else localStorage.setItem(KEY, other);
    show();
  };
})();
