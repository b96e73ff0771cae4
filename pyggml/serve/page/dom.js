// Elements without a framework. Text gets into the page as text nodes alone: HTML is never made of text.

const SVG = "http://www.w3.org/2000/svg";

/** The element with this id. */
export const $ = (id) => document.getElementById(id);

/** An element: `h("button.primary", { type: "button", onclick }, "Send")`. Functions listen, booleans are set or left out. */
export function h(tag, attributes = {}, ...children) {
  const [name, ...classes] = tag.split(".");
  const element = document.createElement(name || "div");
  if (classes.length) element.classList.add(...classes);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (typeof value === "function") element.addEventListener(key.slice(2), value);
    else if (key in element && typeof value === "boolean") element[key] = value;
    else element.setAttribute(key, value);
  }
  element.append(...children.filter((c) => c !== null && c !== undefined && c !== false));
  return element;
}

/** A symbol of icons.svg. */
export function icon(name) {
  const svg = document.createElementNS(SVG, "svg");
  const use = document.createElementNS(SVG, "use");
  svg.setAttribute("class", "icon");
  svg.setAttribute("aria-hidden", "true");
  use.setAttribute("href", `icons.svg#${name}`);
  svg.append(use);
  return svg;
}

/** A button that shows a symbol and says its name to screen readers, and when the mouse rests on it. */
export function iconButton(name, label, onclick, more = {}) {
  return h("button.icon-button", { type: "button", "aria-label": label, title: label, onclick, ...more }, icon(name));
}

/** Run `work` once per picture that is drawn, however often the returned function is called. */
export function eachFrame(work) {
  let asked = 0;
  return () => {
    asked ||= requestAnimationFrame(() => {
      asked = 0;
      work();
    });
  };
}

/** Copy a text, and show for a moment on the button that it is done. */
export async function copy(text, button) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const area = h("textarea.hidden"); // without HTTPS there is no clipboard
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
    button.focus();
  }
  say("Copied");
  button.classList.add("done");
  setTimeout(() => button.classList.remove("done"), 1200);
}

/** Have a screen reader say something. */
export function say(text) {
  $("live").textContent = text;
}
