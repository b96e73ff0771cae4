// The messages of a conversation on the page, or the pieces of a text.

import { copy, h, icon, iconButton } from "./dom.js";
import { render } from "./markdown.js";
import { picturesOf } from "./pictures.js";
import { setHeat, tokenLeaf } from "./probe.js";
import { path, place } from "./tree.js";

/** Draws a conversation into `root`. `act` has what the buttons do: edit, again, more, turn. */
export class Thread {
  #root;
  #act;
  #conversation = null;
  #running = () => false;
  #editing = null; // the id of the message that is being edited
  #hot = new Set(); // ids of messages whose probabilities are shown

  constructor(root, act) {
    this.#root = root;
    this.#act = act;
  }

  /** Draw everything. */
  show(conversation, running) {
    if (conversation !== this.#conversation) this.#editing = null;
    this.#conversation = conversation;
    this.#running = running;
    const shown = path(conversation);
    if (!shown.some((node) => node.id === this.#editing)) this.#editing = null;
    const made = conversation.mode === "text" ? this.#text(shown) : shown.map((node) => this.#message(node, node === shown.at(-1)));
    this.#root.replaceChildren(...made);
    this.#heat();
  }

  /** Draw the text of one message again. */
  update(node) {
    const body = this.#root.querySelector(`[data-id="${node.id}"] .body`);
    if (!body) return;
    this.#fill(body, node);
    this.#heat(node.id);
    const meta = this.#root.querySelector(`[data-acts="${node.id}"] .meta`);
    if (meta) meta.textContent = figures(node);
  }

  get isEditing() {
    return this.#editing !== null;
  }

  #heat(id = null) {
    for (const element of this.#root.querySelectorAll("[data-id]")) {
      if (id === null || element.dataset.id === id) setHeat(element, this.#hot.has(element.dataset.id));
    }
  }

  #fill(body, node) {
    const made = document.createDocumentFragment();
    if (node.reasoning) {
      const old = body.querySelector("details.thought");
      made.append(h("details.thought", { open: old?.open ?? false }, h("summary", {}, "Reasoning"), h("p", {}, node.reasoning)));
    }
    const leaf = tokenLeaf(node);
    if (this.#conversation.mode === "text" || node.role === "user") leaf(made, node.text, 0);
    else render(made, node.text, leaf);
    body.replaceChildren(made);
    body.classList.toggle("waiting", this.#running(node) && !node.text && !node.reasoning);
    body.classList.toggle("writing", this.#running(node));
  }

  // -- a chat -------------------------------------------------------------------------------------------------------

  #message(node, isLast) {
    const mine = node.role === "user";
    const name = mine ? "You" : "Answer";
    const article = h(`article.message.${node.role}`, { "data-id": node.id, "aria-label": name, "aria-busy": String(this.#running(node)) });
    if (this.#editing === node.id) {
      article.append(this.#form(node));
      return article;
    }
    const body = h("div.body");
    this.#fill(body, node);
    if (node.pictures) article.append(picturesOf(node));
    if (node.text || !mine) article.append(body);
    if (node.error) article.append(h("p.error", { role: "alert" }, node.error));
    article.append(this.#acts(node, isLast));
    return article;
  }

  #acts(node, isLast) {
    const acts = h("div.acts", { "data-acts": node.id, role: "group", "aria-label": "About this message" });
    if (isLast) acts.classList.add("always");
    const busy = this.#running(node);
    const switcher = this.#switcher(node);
    if (switcher) acts.append(switcher);
    if (!busy && node.text) {
      const copyButton = iconButton("copy", "Copy", () => copy(node.text, copyButton));
      copyButton.append(icon("check"));
      acts.append(copyButton, iconButton("edit", "Edit", () => this.#edit(node)));
    }
    if (!busy && node.role === "assistant") {
      if (node.error) acts.append(iconButton("again", "Try again", () => this.#act.more(node)));
      else acts.append(iconButton("again", "Another answer", () => this.#act.again(node)));
      if (isLast && node.text && !node.error && node.end !== "stop") {
        acts.append(iconButton("on", "Continue", () => this.#act.more(node)));
      }
      acts.append(this.#probabilities(node));
    }
    if (node.role === "assistant") acts.append(h("span.meta", {}, figures(node)));
    return acts;
  }

  #probabilities(node) {
    const known = node.tokens?.some((token) => token[2]);
    if (!known) return "";
    const on = () => this.#hot.has(node.id);
    const button = iconButton("tokens", "Probabilities of tokens", () => {
      if (on()) this.#hot.delete(node.id);
      else this.#hot.add(node.id);
      button.setAttribute("aria-pressed", String(on()));
      this.#heat(node.id);
      if (on()) this.#root.querySelector(`[data-id="${node.id}"] .t`)?.focus({ preventScroll: true });
    });
    button.setAttribute("aria-pressed", String(on()));
    return button;
  }

  #switcher(node) {
    const [i, n] = place(this.#conversation, node);
    if (n < 2) return null;
    const what = this.#conversation.mode === "text" ? "Version" : node.role === "user" ? "Message" : "Answer";
    const go = (step, label) => {
      const known = step < 0 ? i > 0 : i < n - 1;
      return iconButton(step < 0 ? "left" : "right", label, () => this.#act.turn(node, step), { disabled: !known });
    };
    const text = h("span", { "aria-label": `${what} ${i + 1} of ${n}` }, `${i + 1}/${n}`);
    return h("span.switcher", { role: "group", "aria-label": what }, go(-1, `${what} before`), text, go(1, `${what} after`));
  }

  // -- editing ------------------------------------------------------------------------------------------------------

  #edit(node) {
    this.#editing = node.id;
    this.show(this.#conversation, this.#running);
    const area = this.#root.querySelector("form.edit textarea");
    area.focus();
    area.setSelectionRange(area.value.length, area.value.length);
  }

  #form(node) {
    const asks = node.role === "user";
    const area = h("textarea", { "aria-label": asks ? "Your message" : "The answer", rows: 1 });
    area.value = node.text;
    const close = () => {
      this.#editing = null;
      this.show(this.#conversation, this.#running);
      this.#root.querySelector(`[data-acts="${node.id}"] button[aria-label="Edit"]`)?.focus();
    };
    const form = h(
      "form.edit",
      {
        onsubmit: (e) => {
          e.preventDefault();
          this.#editing = null;
          if (area.value.trim() && area.value !== node.text) this.#act.edit(node, area.value);
          else close();
        },
        onkeydown: (e) => {
          if (e.key === "Escape") {
            e.stopPropagation();
            close();
          } else if (e.key === "Enter" && !e.shiftKey && !e.isComposing) {
            e.preventDefault();
            form.requestSubmit();
          }
        },
      },
      area,
      h("div.row", {}, h("button.quiet", { type: "button", onclick: close }, "Cancel"), h("button.primary", {}, asks ? "Send" : "Keep")),
    );
    return form;
  }

  // -- a text -------------------------------------------------------------------------------------------------------

  #text(shown) {
    if (!shown.length) return [];
    const page = h("article.text", { "aria-label": "Text" });
    for (const node of shown) {
      const piece = h(`span.piece.${node.role}`, { "data-id": node.id, "aria-busy": String(this.#running(node)) });
      if (this.#editing === node.id) {
        page.append(this.#form(node));
        continue;
      }
      const body = h("span.body");
      this.#fill(body, node);
      const switcher = node === shown.at(-1) ? null : this.#switcher(node);
      if (switcher) piece.append(switcher);
      piece.append(body);
      if (node.role === "user" && !this.#running(shown.at(-1))) piece.append(iconButton("edit", "Edit this part", () => this.#edit(node)));
      page.append(piece);
    }
    const end = shown.at(-1);
    const made = [page];
    if (end.error) made.push(h("p.error", { role: "alert" }, end.error));
    const acts = this.#acts(end, true);
    if (end.role === "assistant" && !this.#running(end)) {
      const all = shown.map((node) => node.text).join("");
      const copyButton = iconButton("copy", "Copy the text", () => copy(all, copyButton));
      copyButton.append(icon("check"));
      acts.querySelector('[aria-label="Copy"]')?.replaceWith(copyButton);
    }
    return [...made, acts];
  }
}

/** How long an answer is, and how fast it came. */
function figures(node) {
  const t = node.timings;
  if (!t?.n) return node.end === "stopped" ? "stopped" : "";
  const rate = t.rate >= 100 ? t.rate.toFixed(0) : t.rate.toFixed(1);
  const why = node.end === "stopped" ? " · stopped" : "";
  return `${t.n} ${t.n === 1 ? "token" : "tokens"} · ${rate} tokens/s${why}`;
}
