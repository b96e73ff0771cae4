// Markdown to elements: paragraphs, headings, lists, quotes, rules, fenced code, bold, italic, code and links. Text gets
// into the page by text nodes alone, and links lead to http, https and mailto only. Each character knows its place in
// the source, so that the tokens of an answer can be found in what is shown.

import { copy, h, icon } from "./dom.js";

const FENCE = /^(\s{0,3})(`{3,}|~{3,})\s*([^`\s]*)[^`]*$/;
const HEADING = /^\s{0,3}(#{1,6})\s+(.*?)(\s+#+)?\s*$/;
const RULE = /^\s{0,3}([-*_])(\s*\1){2,}\s*$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])(\s+|$)/;
const QUOTE = /^\s{0,3}>\s?/;
const SAFE = /^(https?:|mailto:)/i;
const BARE = /^https?:\/\/[^\s<>"')\]]*[^\s<>"')\].,;:!?]/;

/** Append the elements of a text to `into`. `leaf(parent, text, at)` appends text that stands at `at` in the source. */
export function render(into, source, leaf) {
  let at = 0;
  const lines = source.split("\n").map((text) => {
    const line = { text, at };
    at += text.length + 1;
    return line;
  });
  blocks(into, lines, leaf);
}

const cut = (line, n) => ({ text: line.text.slice(n), at: line.at + Math.min(n, line.text.length) });
const isBlank = (line) => !line.text.trim();
const indent = (line) => line.text.length - line.text.trimStart().length;

function blocks(into, lines, leaf) {
  let i = 0;
  while (i < lines.length) {
    const line = lines[i];
    let m;
    if (isBlank(line)) i++;
    else if ((m = FENCE.exec(line.text))) i = fenced(into, lines, i, m, leaf);
    else if ((m = HEADING.exec(line.text))) {
      const heading = h(`h${Math.min(m[1].length + 2, 6)}`); // the page has a first and a second level of its own
      inline(heading, [{ text: m[2], at: line.at + line.text.indexOf(m[2], m[0].indexOf("#") + m[1].length) }], leaf);
      into.append(heading);
      i++;
    } else if (RULE.test(line.text)) {
      into.append(h("hr"));
      i++;
    } else if (QUOTE.test(line.text)) {
      const inner = [];
      for (; i < lines.length && !isBlank(lines[i]); i++) inner.push(cut(lines[i], QUOTE.exec(lines[i].text)?.[0].length ?? 0));
      const quote = h("blockquote");
      blocks(quote, inner, leaf);
      into.append(quote);
    } else if (ITEM.test(line.text)) i = list(into, lines, i, leaf);
    else {
      const from = i;
      for (i++; i < lines.length && !isBlank(lines[i]) && !opens(lines[i].text); i++);
      const p = h("p");
      inline(p, lines.slice(from, i), leaf);
      into.append(p);
    }
  }
}

const opens = (text) => FENCE.test(text) || HEADING.test(text) || RULE.test(text) || QUOTE.test(text) || ITEM.test(text);

function fenced(into, lines, i, m, leaf) {
  const [, space, fence, language] = m;
  const end = new RegExp(`^\\s{0,3}${fence[0]}{${fence.length},}\\s*$`);
  const code = h("code");
  const taken = [];
  for (i++; i < lines.length && !end.test(lines[i].text); i++) taken.push(cut(lines[i], Math.min(indent(lines[i]), space.length)));
  taken.forEach((line, k) => leaf(code, k < taken.length - 1 ? `${line.text}\n` : line.text, line.at));
  const button = h("button.copy", { type: "button", "aria-label": "Copy code" }, icon("copy"), icon("check"), h("span", {}, "Copy"));
  button.addEventListener("click", () => copy(taken.map((line) => line.text).join("\n"), button));
  into.append(h("figure.code", {}, h("figcaption", {}, h("span", {}, language || "text"), button), h("pre", { tabindex: 0 }, code)));
  return i + 1;
}

function list(into, lines, i, leaf) {
  const first = ITEM.exec(lines[i].text);
  const ordered = /\d/.test(first[2]);
  const element = h(ordered ? "ol" : "ul", ordered && parseInt(first[2]) !== 1 ? { start: parseInt(first[2]) } : {});
  const base = first[1].length;
  while (i < lines.length) {
    const m = ITEM.exec(lines[i].text);
    if (!m || RULE.test(lines[i].text) || m[1].length > base + 3 || m[1].length < base || /\d/.test(m[2]) !== ordered) break;
    const width = m[1].length + m[2].length + Math.min(m[3].length || 1, 4);
    const inner = [cut(lines[i], width)];
    for (i++; i < lines.length; i++) {
      const line = lines[i];
      if (isBlank(line)) {
        const next = lines.slice(i).find((l) => !isBlank(l));
        if (!next || indent(next) < Math.min(width, base + 2)) break;
        inner.push(line);
      } else if (indent(line) >= Math.min(width, base + 2)) inner.push(cut(line, Math.min(indent(line), width)));
      else if (opens(line.text) || isBlank(lines[i - 1])) break;
      else inner.push(line);
    }
    const item = h("li");
    const tight = inner.findIndex((l, k) => k && (isBlank(l) || opens(l.text)));
    const head = tight < 0 ? inner : inner.slice(0, tight);
    if (opens(head[0].text) || isBlank(head[0])) blocks(item, inner, leaf);
    else {
      inline(item, head, leaf);
      blocks(item, tight < 0 ? [] : inner.slice(tight), leaf);
    }
    element.append(item);
    const k = lines.findIndex((l, j) => j >= i && !isBlank(l));
    if (k > i && ITEM.test(lines[k].text)) i = k; // a blank line between two items
  }
  into.append(element);
  return i;
}

// -- within a line -------------------------------------------------------------------------------------------------------

/** Lines as one text, with the place in the source of each of its characters. */
function inline(into, lines, leaf) {
  const text = lines.map((line) => line.text.trimEnd()).join("\n");
  const at = [];
  for (const line of lines) {
    for (let k = 0; k <= line.text.trimEnd().length; k++) at.push(line.at + k);
  }
  spans(into, text, 0, text.length, at, leaf);
}

function spans(into, text, from, to, at, leaf) {
  let plain = from; // where text begins that has not been appended yet
  const flush = (end) => {
    let a = plain;
    for (let k = a; k <= end; k++) {
      if (k < end && text[k] !== "\n" && (k === a || at[k] === at[k - 1] + 1)) continue;
      if (k > a) leaf(into, text.slice(a, k), at[a]);
      if (k < end && text[k] === "\n") into.append(h("br"));
      a = k < end && text[k] === "\n" ? k + 1 : k;
    }
  };
  const wrap = (tag, a, b, next, attributes) => {
    const element = h(tag, attributes);
    spans(element, text, a, b, at, leaf);
    into.append(element);
    plain = next;
    return next;
  };
  let i = from;
  while (i < to) {
    const c = text[i];
    if (c === "\\" && i + 1 < to && /[!-/:-@[-`{-~]/.test(text[i + 1])) {
      flush(i);
      plain = i + 1;
      i += 2;
      continue;
    }
    if (c === "`") {
      const ticks = /^`+/.exec(text.slice(i, to))[0];
      const rest = text.slice(i + ticks.length, to);
      const m = new RegExp(`(?<!\`)${ticks}(?!\`)`).exec(rest);
      if (m) {
        flush(i);
        const code = h("code");
        const start = i + ticks.length;
        leaf(code, rest.slice(0, m.index).replace(/\n/g, " "), at[start]);
        into.append(code);
        i = plain = start + m.index + ticks.length;
        continue;
      }
      i += ticks.length;
      continue;
    }
    if (c === "*" || c === "_") {
      const n = text[i + 1] === c ? 2 : 1;
      const end = closing(text, i, n, to);
      if (end > 0) {
        flush(i);
        i = wrap(n === 2 ? "strong" : "em", i + n, end, end + n);
        continue;
      }
      i += n;
      continue;
    }
    if (c === "[") {
      const m = /^\[((?:[^[\]]|\[[^\]]*\])*)\]\(\s*<?([^\s<>()]*(?:\([^\s()]*\)[^\s<>()]*)*)>?(?:\s+"[^"]*")?\s*\)/.exec(text.slice(i, to));
      if (m && SAFE.test(m[2])) {
        flush(i);
        i = wrap("a", i + 1, i + 1 + m[1].length, i + m[0].length, link(m[2]));
        continue;
      }
    }
    if (c === "h" && !/\w/.test(text[i - 1] ?? " ")) {
      const m = BARE.exec(text.slice(i, to));
      if (m) {
        flush(i);
        const a = h("a", link(m[0]));
        leaf(a, m[0], at[i]);
        into.append(a);
        i = plain = i + m[0].length;
        continue;
      }
    }
    i++;
  }
  flush(to);
}

const link = (href) => ({ href, target: "_blank", rel: "noopener noreferrer" });

/** Where the `n` marks end that begin at `i`; -1 when they do not. */
function closing(text, i, n, to) {
  const c = text[i];
  const mark = c.repeat(n);
  if (i + n >= to || /\s/.test(text[i + n])) return -1;
  if (c === "_" && /\w/.test(text[i - 1] ?? " ")) return -1;
  for (let k = text.indexOf(mark, i + n + 1); k > 0 && k + n <= to; k = text.indexOf(mark, k + 1)) {
    if (/\s/.test(text[k - 1]) || text[k - 1] === "\\") continue;
    if (n === 1 && (text[k + 1] === c || text[k - 1] === c)) {
      k++;
      continue;
    }
    if (c === "_" && /\w/.test(text[k + n] ?? " ")) continue;
    return k;
  }
  return -1;
}
