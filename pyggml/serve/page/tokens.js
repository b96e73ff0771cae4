// The tokens of an answer: [text] or [text, log-probability, [[text, log-probability, id], ...]]. Their texts, one after the
// other, are the text of the answer.

/** Fits the tokens that a stream reports to the text that it shows. They differ where a character has several tokens, and
    where a reply has parts that are not shown. */
export class Aligner {
  #held = []; // tokens whose text has not been shown yet
  #decoder = new TextDecoder();

  /** The tokens that make up `text`, which has come with `entries` of its tokens (perhaps none). */
  take(text, entries) {
    for (const entry of entries ?? []) {
      const s = this.#decoder.decode(new Uint8Array(entry.bytes ?? []), { stream: true });
      const top = (entry.top_logprobs ?? []).map((x) => [x.token, round(x.logprob), ...(x.id === undefined ? [] : [x.id])]);
      this.#held.push([s, round(entry.logprob), top]);
    }
    if (!text) return [];
    const all = this.#held.map((t) => t[0]).join("");
    const at = all.lastIndexOf(text);
    if (at < 0) {
      this.#held = [];
      return [[text]];
    }
    const found = [];
    let from = 0;
    let first = null; // the token with which a character began that is not whole yet
    for (const token of this.#held) {
      const to = from + token[0].length;
      const shown = token[0].slice(Math.max(at - from, 0), Math.max(at + text.length - from, 0));
      if (!token[0]) first ??= token;
      else if (shown) {
        found.push([shown, ...(first ?? token).slice(1)]);
        first = null;
      }
      from = to;
    }
    const end = at + text.length;
    this.#held = all.length > end ? [[all.slice(end), ...this.#held.at(-1).slice(1)]] : [];
    return found;
  }
}

const round = (x) => Math.round(x * 1000) / 1000;

/** A token as one sees it: spaces and line ends made visible. */
export const visible = (text) => text.replace(/\n/g, "⏎").replace(/\t/g, "⇥").replace(/^ +| +$/g, (s) => "␣".repeat(s.length)) || "∅";

/** A probability as text. */
export function percent(logprob) {
  const p = Math.exp(logprob) * 100;
  return p >= 99.95 ? "100 %" : p >= 10 ? `${p.toFixed(0)} %` : p >= 0.1 ? `${p.toFixed(1)} %` : "< 0.1 %";
}

/** How unlikely a token was, in five steps: 0 is what was to be expected. */
export function surprise(token) {
  if (token[1] === undefined) return 0;
  const p = Math.exp(token[1]);
  return p > 0.6 ? 0 : p > 0.3 ? 1 : p > 0.1 ? 2 : p > 0.02 ? 3 : 4;
}
