// Puts the parts together.
const data = JSON.parse(document.getElementById("data").textContent), T = data.tensors, id = (name) => document.getElementById(name);
T.forEach((t) => { t.users = []; });
T.forEach((t, i) => { for (const s of new Set(t.src)) if (s >= 0) T[s].users.push(i); });
data.steps.forEach((s) => { s.work = workOf(s.nodes.map((i) => T[i].op)); });
data.steps.forEach((s) => s.nodes.forEach((i, k) => { T[i].step = s; T[i].last = k === s.nodes.length - 1; T[i].us = T[i].last ? s.us : 0; }));
id("title").textContent = data.title;
id("about").textContent = Object.entries(data.about).map(([k, v]) => `${k}: ${v}`).join("   ·   ");
const sum = (f) => data.steps.reduce((a, s) => a + f(s), 0), work = sum((s) => s.flops), moved = sum((s) => s.bytes);
const idle = Math.max(0, 1 - sum((s) => s.spans.reduce((a, [, b, e]) => a + e - b, 0)) / (data.wall * data.n_threads));
const tiles = [[T.filter((t) => t.op !== "none").length.toLocaleString("en"), "nodes"], [T.filter((t) => t.op === "none").length.toLocaleString("en"), "leafs"], [micro(data.wall), "run"],
  [fixed(rate(moved, data.wall)), "GB/s"], [fixed(rate(work, data.wall)), "GFLOPS"], [(100 * idle).toFixed(0) + " %", `idle, ${data.n_threads} thread${data.n_threads > 1 ? "s" : ""}`], [bytes(data.pools.reduce((s, p) => s + p.size, 0)), "compute buffer"]];
for (const [value, name] of tiles) { const div = element("div", "tile"); div.append(element("b", "", value), element("span", "", name)); id("tiles").append(div); }

const tip = (text, e) => {
  const box = id("tip");
  box.style.display = text ? "block" : "none";
  if (!text) return;
  box.textContent = text;
  box.style.left = Math.min(e.clientX + 14, innerWidth - box.offsetWidth - 8) + "px";
  box.style.top = Math.min(e.clientY + 14, innerHeight - box.offsetHeight - 8) + "px";
};
let mouse = null;
addEventListener("pointermove", (e) => { mouse = e; }, true);
const about = (i) => { const t = T[i]; return `${t.name} · ${t.op === "none" ? t.kind : t.op}\n${t.type} ${trimmed(t.ne)}${t.step ? "\n" + micro(t.step.us) : ""}${t.values ? `\n${number(t.values.low)} .. ${number(t.values.high)}` : ""}`; };
const graph = Graph(id("graph"), data, (i) => select(i), (i) => tip(i < 0 ? "" : about(i), mouse));
const panel = details(id("details"), data, select, tip);
const time = timeLine(id("time"), data, (i) => select(i, true), tip), memory = memoryMap(id("memory"), data, (i) => select(i, true), tip);
const nodes = nodeTable(id("tab-nodes"), data, (i) => select(i, true));
opTable(id("tab-ops"), data);
let selected = -1;
function select(i, bring) { selected = i; document.body.classList.toggle("chosen", i >= 0); for (const part of [panel, time, memory, nodes]) part.select(i); graph.select(i, bring); }

// search
let hits = [], chosen = 0;
function search(text) {
  const words = text.toLowerCase().split(/\s+/).filter(Boolean);
  hits = words.length ? T.map((t, i) => i).filter((i) => words.every((w) => T[i].name.toLowerCase().includes(w) || T[i].op === w)) : [];
  chosen = 0;
  nodes.filter(words.length ? hits : null);
  list();
}
function list() {
  id("hits").className = document.activeElement === id("search") && id("search").value.trim() ? "on" : "";
  id("hits").replaceChildren(...hits.slice(0, 60).map((i, k) => { const li = element("li", k === chosen ? "on" : "", T[i].name); li.append(element("small", "", T[i].op === "none" ? "leaf" : T[i].op)); li.onmousedown = () => select(i, true); return li; }));
  if (!hits.length) id("hits").append(element("li", "", "nothing of that name"));
}
id("search").oninput = (e) => search(e.target.value);
id("search").onblur = id("search").onfocus = list;
id("search").onkeydown = (e) => {
  if (e.key === "ArrowDown" || e.key === "ArrowUp") { chosen = Math.max(0, Math.min(Math.min(hits.length, 60) - 1, chosen + (e.key === "ArrowDown" ? 1 : -1))); list(); e.preventDefault(); }
  if (e.key === "Enter" && hits.length) { select(hits[chosen], true); chosen = (chosen + 1) % Math.min(hits.length, 60); list(); }
  if (e.key === "Escape") { e.target.value = ""; search(""); e.target.blur(); }
  e.stopPropagation();
};

// buttons and keys
const HINTS = { time: "wheel: zoom, drag: move, click: select", memory: "each block: a tensor, from the step that makes it to the last that needs it", ops: "steps of the run, fused as they ran", nodes: "click the head of a column to sort" };
const swatch = (fill, line, text) => { const span = element("span"), i = element("i"); i.style.background = fill; i.style.borderColor = line; span.append(i, text); return span; };
function show(tab) {
  for (const b of document.querySelectorAll("nav button")) b.className = b.dataset.tab === tab ? "on" : "";
  for (const t of document.querySelectorAll(".tab")) t.classList.toggle("on", t.id === "tab-" + tab);
  id("hint").textContent = HINTS[tab];
  const works = tab === "nodes" ? [] : WORK.filter((w) => tab === "memory" ? T.some((t) => t.op !== "none" && workOf([t.op]) === w) : data.steps.some((s) => s.work === w));
  id("works").replaceChildren(...works.map(([name, colour]) => swatch(colour, colour, name)));
  resize();
}
function resize() { for (const part of [graph, time, memory, nodes]) part.resize(); }
let all = false, byTime = false;
const NAMES = ["bg", "panel", "ink", "muted", "line", "edge", "accent", "hot", "cold", "node", "node-line", "view", "view-line", "weight", "weight-line", "input", "input-line", "output", "output-line", "layer", "layer-line", "layer-open", "fold-open", "bad", "bar-ink"];
function theme(name) {
  document.documentElement.dataset.theme = name;
  const style = getComputedStyle(document.documentElement), colours = Object.fromEntries(NAMES.map((n) => [n, style.getPropertyValue("--" + n).trim()]));
  for (const part of [graph, panel, time, memory]) part.theme(colours);
  key();
}
function key() {
  const kinds = byTime ? [["cold", "fast"], ["hot", "slow"]] : [["node", "computed"], ["view", "view"], ["weight", "weight, cache"], ["input", "input"], ["output", "output"], ["layer", "layer"]];
  id("key").replaceChildren(...kinds.map(([kind, text]) => swatch(`var(--${kind})`, byTime ? `var(--${kind})` : `var(--${kind}-line)`, text)));
}
const actions = {
  fit: () => graph.fit(),
  unfold: () => { all = !all; graph.openAll(all); id("unfold").textContent = all ? "Fold all" : "Unfold all"; },
  colour: () => { byTime = !byTime; graph.colour(byTime); id("colour").textContent = "Colour: " + (byTime ? "time" : "kind"); key(); },
  theme: () => theme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"),
};
for (const [name, act] of Object.entries(actions)) id(name).onclick = act;
for (const b of document.querySelectorAll("nav button")) b.onclick = () => show(b.dataset.tab);
addEventListener("keydown", (e) => {
  if (e.ctrlKey || e.metaKey || e.altKey) return;
  if (e.key === "/") { id("search").focus(); e.preventDefault(); }
  if (e.key === "Escape") select(-1);
  const act = { f: "fit", u: "unfold", c: "colour", d: "theme" }[e.key];
  if (act) actions[act]();
});
addEventListener("resize", resize);
show("time");
theme(matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
graph.start();
if (!graph.folded()) { all = true; id("unfold").textContent = "Fold all"; }
select(-1);
window.inspector = { graph, time, memory, select, show, theme, data, selected: () => selected };
