// The list of conversations.

import { $, h, iconButton } from "./dom.js";

/** Draw the list. `act` has open and remove; `isBusy(conversation)`: whether an answer is under way in it. */
export function showConversations(all, current, isBusy, act) {
  const rows = all.map((conversation) => {
    const is = conversation === current;
    const title = conversation.title || (conversation.mode === "text" ? "New text" : "New chat");
    return h(
      `li${is ? ".on" : ""}${isBusy(conversation) ? ".busy" : ""}`,
      {},
      h("button.open", { type: "button", "aria-current": is ? "page" : null, onclick: () => act.open(conversation) }, title),
      iconButton("trash", `Delete: ${title}`, () => act.remove(conversation)),
    );
  });
  $("conversations").replaceChildren(...rows);
}

/** Offer a file to the user. */
export function download(name, value) {
  const url = URL.createObjectURL(new Blob([JSON.stringify(value, null, 1)], { type: "application/json" }));
  const a = h("a", { href: url, download: name });
  a.click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}

/** A side of the page that can be opened over it on narrow screens, and beside it on wide ones. */
export function drawer(side, button, name) {
  const set = (open) => {
    document.body.classList.toggle(name, open);
    button.setAttribute("aria-expanded", String(open));
  };
  button.addEventListener("click", () => {
    const open = !document.body.classList.contains(name);
    set(open);
    if (open) side.querySelector("button, input, textarea, select")?.focus({ preventScroll: true });
  });
  side.addEventListener("keydown", (e) => {
    if (e.key !== "Escape" || !document.body.classList.contains(name)) return;
    e.stopPropagation();
    set(false);
    button.focus();
  });
  return { close: () => set(false), open: () => set(true) };
}
