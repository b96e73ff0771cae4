// The panel at the side: the system prompt, the fields of sampling, and what the server says of itself.

import { $, h } from "./dom.js";
import { defaultLength } from "./generate.js";
import { saveSettings, settings } from "./store.js";

// name, label, step, what it does
const MAIN = [
  ["temperature", "Temperature", 0.05, "0 takes the likeliest token each time; higher values vary more"],
  ["n_predict", "Longest answer", 1, "In tokens; -1 is as long as there is room"],
  ["top_k", "Top K", 1, "Only the K likeliest tokens; 0 is all"],
  ["top_p", "Top P", 0.01, "Only the likeliest tokens that make up this share"],
  ["min_p", "Min P", 0.01, "Only tokens at least this likely, beside the likeliest"],
  ["repeat_penalty", "Repeat penalty", 0.05, "Above 1: what was said before becomes less likely"],
  ["presence_penalty", "Presence penalty", 0.1, "Taken off what was said at all"],
  ["frequency_penalty", "Frequency penalty", 0.1, "Taken off for each time that it was said"],
  ["seed", "Seed", 1, "The same seed gives the same answer"],
];
const MORE = [
  ["typical_p", "Typical P", 0.01, "Only tokens about as surprising as is to be expected"],
  ["top_n_sigma", "Top n sigma", 0.1, "Only tokens within n deviations of the best"],
  ["xtc_probability", "XTC probability", 0.05, "How often the likeliest tokens are left out"],
  ["xtc_threshold", "XTC threshold", 0.01, "From which probability on they are"],
  ["repeat_last_n", "Penalty window", 1, "How many tokens back repetition is looked for"],
  ["dry_multiplier", "DRY multiplier", 0.1, "Against sequences that repeat; 0 is off"],
  ["dry_base", "DRY base", 0.05, "How fast that grows with their length"],
  ["dry_allowed_length", "DRY length", 1, "Sequences up to this length may repeat"],
  ["dynatemp_range", "Dynamic range", 0.05, "By how much the temperature may change"],
  ["mirostat", "Mirostat", 1, "0 is off; 1 and 2 are its versions"],
  ["mirostat_tau", "Mirostat tau", 0.1, "The surprise that it aims at"],
  ["mirostat_eta", "Mirostat eta", 0.01, "How fast it learns"],
];
const RANDOM = 0xffffffff;

/** Fill the panel once what the server has by default is known. `changed`: called after a change. */
export function startSettings(server, changed) {
  const defaults = server.props?.default_generation_settings?.params ?? {};
  const field = ([name, label, step, help]) => {
    if (!(name in defaults)) return null;
    const input = h("input", { type: "number", step: "any", id: `s-${name}`, "data-name": name, "data-step": step, title: help, inputmode: "decimal" });
    input.value = settings.sampling[name] ?? "";
    input.addEventListener("keydown", (e) => {
      const by = { ArrowUp: step, ArrowDown: -step }[e.key];
      if (!by) return;
      e.preventDefault();
      input.value = Number((Number(input.value === "" ? shownDefault(server, name, defaults) : input.value) + by).toFixed(4));
      input.dispatchEvent(new Event("input"));
    });
    input.addEventListener("input", () => {
      if (input.value === "") delete settings.sampling[name];
      else settings.sampling[name] = Number(input.value);
      done();
    });
    return h("div.field", {}, h("label", { for: input.id, title: help }, label), input);
  };
  const stop = h("input", { type: "text", id: "s-stop", placeholder: "none", title: "Texts that end an answer, with | between them" });
  stop.value = (settings.sampling.stop ?? []).join("|");
  stop.addEventListener("input", () => {
    const texts = stop.value.split("|").filter(Boolean);
    if (texts.length) settings.sampling.stop = texts;
    else delete settings.sampling.stop;
    done();
  });
  const reset = h("button.link", { type: "button" }, "Reset");
  reset.addEventListener("click", () => {
    settings.sampling = {};
    for (const input of $("sampling").querySelectorAll("input")) input.value = "";
    done();
    $("sampling").querySelector("input").focus();
  });
  const done = () => {
    reset.hidden = !Object.keys(settings.sampling).length;
    saveSettings();
    changed();
  };
  const more = MORE.map(field).filter(Boolean);
  $("sampling").replaceChildren(
    h("div.title", {}, h("h2", {}, "Sampling"), reset),
    ...MAIN.map(field).filter(Boolean),
    h("div.field", {}, h("label", { for: "s-stop" }, "Stop at"), stop),
    more.length ? h("details", {}, h("summary", {}, "More"), ...more) : "",
  );
  reset.hidden = !Object.keys(settings.sampling).length;
}

/** Show the defaults in fields that are empty; they differ a little between chats and texts. */
export function showDefaults(server, mode) {
  const defaults = server.props?.default_generation_settings?.params ?? {};
  for (const input of $("sampling").querySelectorAll("input[data-name]")) {
    input.placeholder = shownDefault(server, input.dataset.name, defaults, mode);
  }
}

function shownDefault(server, name, defaults, mode = "chat") {
  const value = defaults[name];
  if (name === "n_predict") {
    const n = defaultLength(server, mode);
    return n < 0 ? "no limit" : String(n);
  }
  if (name === "seed") return value === RANDOM || value === -1 ? "random" : String(value);
  return String(Math.round(value * 10000) / 10000);
}
