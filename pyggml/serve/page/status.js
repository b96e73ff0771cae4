// What the server does now: its slots, and how many tokens a second they write together.

import { json } from "./api.js";
import { $, h } from "./dom.js";

const BUSY = 700; // ms between two looks while something is under way
const IDLE = 4000;

/** A function that looks at the slots now, and again and again as long as the page is seen. `isBusy`: whether this page
    waits for an answer; `path`: where the slots of the chosen model are. */
export function startStatus(isBusy, path) {
  let before = null;
  let timer = 0;
  let stopped = false;
  const look = async (again = false) => {
    clearTimeout(timer);
    if (again === true) stopped = false;
    if (document.hidden || stopped) return;
    let busy = isBusy();
    try {
      const slots = await json(path());
      const now = performance.now();
      if (before?.n.length !== slots.length || before?.path !== path()) before = null; // of another model
      const n = slots.map((slot) => slot.next_token?.[0]?.n_decoded ?? 0);
      const since = (x, i) => (x < (before.n[i] ?? 0) ? x : x - (before.n[i] ?? 0)); // fewer: another text has begun
      const written = before ? n.reduce((sum, x, i) => sum + since(x, i), 0) : 0;
      const rate = before ? (written / (now - before.now)) * 1000 : 0;
      before = { n, now, path: path() };
      show(slots, rate);
      busy ||= slots.some((slot) => slot.is_processing);
    } catch (e) {
      $("slots").hidden = true;
      if (e.code === 501 || e.code === 401) stopped = true; // the server does not show them
    }
    timer = setTimeout(look, busy ? BUSY : IDLE);
  };
  document.addEventListener("visibilitychange", look);
  return look;
}

function show(slots, rate) {
  const n = slots.filter((slot) => slot.is_processing).length;
  const button = $("slots");
  button.hidden = false;
  const speed = n && rate >= 1 ? `${rate.toFixed(0)} tokens/s` : "";
  button.setAttribute("aria-label", `Server: ${n} of ${slots.length} slots busy${speed && `, ${speed}`}`);
  const dots = slots.slice(0, 16).map((slot) => h(`i${slot.is_processing ? ".busy" : ""}`));
  button.replaceChildren(h("span.rate", {}, speed), h("span.dots", {}, ...dots));
  const rows = slots.map((slot) => {
    const used = (slot.n_prompt_tokens ?? 0) + (slot.next_token?.[0]?.n_decoded ?? 0);
    const bar = h("span.bar", {}, h("i"));
    bar.firstChild.style.setProperty("--p", Math.min(used / slot.n_ctx, 1));
    return h(`li${slot.is_processing ? ".busy" : ""}`, {}, h("span", {}, `Slot ${slot.id}`), bar, h("span.number", {}, `${used} / ${slot.n_ctx}`));
  });
  $("slot-list").replaceChildren(...rows);
}

/** What /v1/models says of a model. */
export function showModel(model) {
  const meta = model?.meta ?? {};
  const rows = [
    ["Model", model?.id],
    ["Parameters", meta.n_params && short(meta.n_params)],
    ["Size", meta.size && `${short(meta.size)}B`],
    ["Context", meta.n_ctx && `${meta.n_ctx} tokens`],
    ["Vocabulary", meta.n_vocab && `${meta.n_vocab} tokens`],
  ];
  $("about").replaceChildren(...rows.filter(([, value]) => value).flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]));
}

function short(n) {
  const units = [[1e12, " T"], [1e9, " G"], [1e6, " M"], [1e3, " k"]];
  const [unit, name] = units.find(([u]) => n >= u) ?? [1, " "];
  const x = n / unit;
  return `${x >= 100 ? x.toFixed(0) : x.toFixed(1)}${name}`;
}
