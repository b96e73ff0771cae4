// The tokens of a text on the page, and what the model held likely in the place of one of them.

import { $, h } from "./dom.js";
import { insideView } from "./inside.js";
import { percent, surprise, visible } from "./tokens.js";

/** A function that appends parts of an answer's text, one element a token (see markdown.js). */
export function tokenLeaf(node) {
  if (!node.tokens) return (parent, text) => parent.append(text);
  const starts = [];
  let n = 0;
  for (const token of node.tokens) {
    starts.push(n);
    n += token[0].length;
  }
  starts.push(n);
  const find = (at) => {
    let [a, b] = [0, node.tokens.length - 1];
    while (a < b) {
      const middle = (a + b + 1) >> 1;
      if (starts[middle] <= at) a = middle;
      else b = middle - 1;
    }
    return a;
  };
  return (parent, text, at) => {
    let i = find(at);
    for (let from = 0; from < text.length; i++) {
      const to = i + 1 < starts.length - 1 ? Math.min(starts[i + 1] - at, text.length) : text.length;
      if (to > from) parent.append(...elements(node.tokens[i], i, text.slice(from, to)));
      from = Math.max(from, to);
    }
  };
}

function elements(token, i, text) {
  if (!token[2]) return [text];
  const space = /^ (?=\S)/.test(text) ? " " : ""; // stands outside, so that a word is marked without it
  return [space, h("span.t", { "data-i": i, "data-surprise": surprise(token) }, text.slice(space.length))];
}

/** A token with its spaces made visible. */
function shape(text) {
  const parts = visible(text).split(/([␣⏎⇥]+)/);
  return h("code", {}, ...parts.map((part, k) => (k % 2 ? h("span.space", {}, part) : part)));
}

/** Shows the alternatives of the token under the mouse, or of the one that was chosen by keyboard or touch.
    `nodeOf(element)`: the message that an element belongs to. `pick(node, i, alternative)`: continue from there.
    `inside(node, i, signal)`: what the model held there, and the pictures before (see inside.js). */
export function startProbe(thread, nodeOf, pick, inside) {
  const box = $("probe");
  let shown = null; // the token's element
  let under = null; // the token's element that the mouse is over
  let pinned = false;
  let timer = 0;
  let asked = null; // ends the request of "Look inside"

  const close = (refocus = false) => {
    clearTimeout(timer);
    shown?.classList.remove("on");
    if (refocus && shown?.isConnected) shown.focus();
    asked?.abort();
    shown = null;
    under = null;
    pinned = false;
    box.hidden = true;
  };

  const open = (span, pin) => {
    const node = nodeOf(span);
    const i = Number(span.dataset.i);
    const token = node?.tokens?.[i];
    if (!token?.[2]) return;
    clearTimeout(timer);
    shown?.classList.remove("on");
    asked?.abort();
    shown = span;
    pinned = pin;
    span.classList.add("on");
    fill(node, i, token);
    box.hidden = false;
    place(span);
    if (pin) (box.querySelector("[aria-current]") ?? box.querySelector("button"))?.focus({ preventScroll: true });
  };

  const fill = (node, i, token) => {
    const [text, logprob, top] = token;
    const all = top.some((t) => t[0] === text) ? top : [...top, [text, logprob]];
    const rows = all.map((t) => {
      const mine = t[0] === text;
      const broken = t[0].includes("�");
      const bar = h("i");
      bar.style.setProperty("--p", Math.exp(t[1]));
      const name = t[0] === "" ? h("em", {}, "end") : shape(t[0]);
      const label = `${t[0] === "" ? "end of text" : visible(t[0])}, ${percent(t[1])}${mine ? ", chosen" : ""}`;
      return h(
        "button.alternative",
        {
          type: "button",
          "aria-label": label,
          "aria-current": mine ? "true" : null,
          disabled: broken,
          onclick: () => {
            close();
            if (!mine) pick(node, i, t);
          },
        },
        bar,
        name,
        h("span", {}, percent(t[1])),
      );
    });
    const look = h("button.look", { type: "button", onclick: () => lookInside(node, i, token, look) }, "Look inside");
    box.classList.remove("inside");
    box.replaceChildren(h("p", {}, "Instead of ", shape(text)), h("div.rows", {}, ...rows), look);
  };

  const lookInside = async (node, i, token, button) => {
    const span = shown;
    const { signal } = (asked = new AbortController());
    pinned = true;
    button.disabled = true;
    button.textContent = "Looking …";
    let view;
    try {
      view = insideView(...(await inside(node, i, signal)));
    } catch (e) {
      if (signal.aborted) return;
      view = [h("p.bad", { role: "alert" }, e.message)];
    }
    if (signal.aborted) return;
    const back = () => {
      fill(node, i, token);
      place(span);
      box.querySelector(".look").focus({ preventScroll: true });
    };
    const again = h("button.look", { type: "button", onclick: back }, "Alternatives");
    box.replaceChildren(h("p", {}, "Before ", shape(token[0])), ...view, again);
    box.classList.add("inside");
    place(span);
    (box.querySelector("input") ?? again).focus({ preventScroll: true });
  };

  const place = (span) => {
    const at = span.getClientRects()[0] ?? span.getBoundingClientRect();
    const { width, height } = box.getBoundingClientRect();
    const below = at.bottom + height + 12 < innerHeight;
    box.style.setProperty("left", `${Math.min(Math.max(at.left - 12, 8), innerWidth - width - 8)}px`);
    const top = below ? at.bottom + 5 : at.top - height - 5;
    box.style.setProperty("top", `${Math.max(Math.min(top, innerHeight - height - 8), 8)}px`);
  };

  thread.addEventListener("pointermove", (e) => {
    if (e.pointerType !== "mouse" || pinned || e.buttons) return;
    const span = e.target.closest?.(".t");
    if (span === under) return;
    under = span;
    clearTimeout(timer);
    if (span && span !== shown) timer = setTimeout(() => span.isConnected && open(span, false), shown ? 60 : 220);
    else if (!span && shown) timer = setTimeout(close, 250);
  });
  thread.addEventListener("pointerleave", () => {
    under = null;
    clearTimeout(timer);
    if (shown && !pinned) timer = setTimeout(close, 250);
  });
  box.addEventListener("pointerenter", () => clearTimeout(timer));
  box.addEventListener("pointerleave", () => {
    if (!pinned) timer = setTimeout(close, 250);
  });
  thread.addEventListener("click", (e) => {
    const span = e.target.closest?.(".t");
    if (span && !e.target.closest("a") && getSelection().isCollapsed) open(span, true);
  });
  thread.addEventListener("keydown", (e) => {
    const span = e.target.closest?.(".t");
    if (!span) return;
    if (e.key === "Enter" || e.key === " ") open(span, true);
    else if (e.key === "ArrowRight" || e.key === "ArrowLeft") {
      const all = [...span.closest("[data-id]").querySelectorAll(".t")];
      const next = all[all.indexOf(span) + (e.key === "ArrowRight" ? 1 : -1)];
      if (!next) return;
      span.tabIndex = -1;
      next.tabIndex = 0;
      next.focus();
    } else return;
    e.preventDefault();
  });
  box.addEventListener("keydown", (e) => {
    const all = [...box.querySelectorAll("button:enabled")];
    const i = all.indexOf(document.activeElement);
    const slides = document.activeElement.matches("input, .context");
    const step = slides ? 0 : { ArrowDown: 1, ArrowUp: -1 }[e.key];
    if (step) all[(i + step + all.length) % all.length].focus();
    else if (e.key === "Escape") {
      e.stopPropagation();
      close(true);
    } else if (e.key !== "Tab" || box.classList.contains("inside")) return;
    else close(true);
    e.preventDefault();
  });
  document.addEventListener("pointerdown", (e) => {
    if (shown && !box.contains(e.target)) close();
  });
  document.addEventListener("keydown", (e) => {
    if (e.key === "Escape" && shown) close();
  });
  $("scroll").addEventListener("scroll", () => shown && close(), { passive: true });
  return close;
}

/** Show how likely the tokens of a message were, and let the keyboard go from one to the next. */
export function setHeat(element, on) {
  element.classList.toggle("heat", on);
  const all = element.querySelectorAll(".t");
  all.forEach((span, k) => {
    if (on) {
      span.tabIndex = k ? -1 : 0;
      span.setAttribute("role", "button");
      span.setAttribute("aria-haspopup", "dialog");
    } else for (const name of ["tabindex", "role", "aria-haspopup"]) span.removeAttribute(name);
  });
}
