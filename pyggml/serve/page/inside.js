// How the model came to a token: where its attention looked, and what each layer would have said.

import { h } from "./dom.js";
import { lookedAt } from "./pictures.js";
import { percent, visible } from "./tokens.js";

/** The elements that show an answer of /v1/inside. The layer that is chosen, by the slider or by its row, colours the
    tokens before by the attention that they got, and leaves light what got it on pictures. `urls`: the pictures. */
export function insideView({ tokens, pictures, layers, attention }, urls) {
  const ofPicture = (j) => pictures.findIndex(({ first, n }) => first <= j && j < first + n);
  const seen = []; // [what stands for token j, j]
  const shown = pictures.map(({ lines, columns }, k) => lines && lookedAt(urls[k], lines, columns));
  const context = tokens.map((t, j) => {
    const k = ofPicture(j);
    if (k >= 0 && j > pictures[k].first) return null;
    if (k >= 0) return shown[k] ? shown[k].element : h("span.place", {}, `picture ${k + 1}`);
    const span = h("span.seen", {}, t.token.replaceAll("\n", "⏎\n"));
    seen.push([span, j]);
    return span;
  });
  const most = h("p.most", { "aria-live": "polite" });
  const of = h("output", { for: "inside-layer" });
  const slider = h("input", { id: "inside-layer", type: "range", min: 0, max: layers.length - 1, step: 1 });
  const rows = layers.map(({ layer, top: [best] }, k) => {
    const bar = h("i");
    bar.style.setProperty("--p", Math.exp(best.logprob));
    const label = `Layer ${layer}: ${visible(best.token)}, ${percent(best.logprob)}`;
    const name = h("code", {}, visible(best.token));
    const press = () => choose(k);
    return h("button.alternative", { type: "button", "aria-label": label, onclick: press }, bar, h("small", {}, layer), name, h("span", {}, percent(best.logprob)));
  });

  const choose = (k) => {
    const { layer } = layers[k];
    const weights = attention.find((a) => a.layer === layer)?.weights;
    slider.value = k;
    of.value = layer;
    slider.setAttribute("aria-valuetext", `layer ${layer}`);
    rows.forEach((row, j) => row.setAttribute("aria-pressed", j === k));
    // the first token takes what heads have no use for: it does not set the scale
    const texts = seen.map(([, j]) => j);
    const scale = Math.max(...texts.filter((j) => j > 0 || tokens.length === 1).map((j) => weights?.[j] ?? 0), 1e-9);
    seen.forEach(([span, j]) => {
      span.style.setProperty("--a", weights ? Math.min(weights[j] / scale, 1) : 0);
      span.title = weights ? percent(Math.log(weights[j])) : "";
    });
    shown.forEach((picture, p) => {
      if (!picture) return;
      const { first, n, lines, columns } = pictures[p];
      const step = (n - lines * columns) / Math.max(lines - 1, 1); // tokens between lines
      picture.look(weights && Array.from({ length: lines * columns }, (_, i) => weights[first + i + Math.floor(i / columns) * step]));
    });
    const order = weights && texts.sort((a, b) => weights[b] - weights[a]).slice(0, 3);
    const list = order?.map((j) => `${visible(tokens[j].token)} ${percent(Math.log(weights[j]))}`).join(", ");
    most.textContent = list ? `Most at ${list}` : "This layer has no attention weights.";
  };
  slider.addEventListener("input", () => choose(Number(slider.value)));
  choose(Math.max(layers.findLastIndex(({ layer }) => attention.some((a) => a.layer === layer)), 0));

  return [
    h("h3", {}, "Attention"),
    h("div.pick", {}, h("label", { for: "inside-layer" }, "Layer"), slider, of),
    h("div.context", { tabindex: 0, role: "region", "aria-label": "The text before, coloured by attention" }, ...context),
    most,
    h("h3", {}, "What each layer would say"),
    h("div.rows.lens", {}, ...rows),
  ];
}
