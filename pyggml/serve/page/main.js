// The page: what is shown, what is under way, and what follows from what the user does.

import { json, setKey } from "./api.js";
import { $, eachFrame, h, icon, say } from "./dom.js";
import { generate, lookInside } from "./generate.js";
import { startPictures } from "./pictures.js";
import { startProbe } from "./probe.js";
import { showDefaults, startSettings } from "./settings.js";
import { download, drawer, showConversations } from "./sidebar.js";
import { showModel, startStatus } from "./status.js";
import { forget, load, save, saveSettings, settings } from "./store.js";
import { Thread } from "./thread.js";
import { add, last, newConversation, path, turn } from "./tree.js";

const OPENINGS = ["Once upon a time", "There was once a king who had three sons", "Deep in the forest stood"];
const server = { props: null, models: [], of: "" }; // of: the query that names the chosen model
const runs = new Map(); // node -> { abort, conversation }
let conversations = load();
let current = conversations.find((c) => c.id === settings.current) ?? null;
let look = null; // looks at the slots

const thread = new Thread($("thread"), {
  edit(node, text) {
    const made = add(current, node.parent, node.role, text);
    if (node.pictures) made.pictures = node.pictures;
    if (node.role === "user") run(current, add(current, made.id, "assistant", ""));
    else made.end = "stop";
    changed(current);
  },
  again: (node) => run(current, add(current, node.parent, "assistant", "")),
  more: (node) => run(current, node),
  turn(node, step) {
    const shown = turn(current, node, step);
    changed(current);
    const at = `[data-acts="${shown.id}"] .switcher button:enabled, .piece[data-id="${shown.id}"] .switcher button:enabled`;
    const buttons = [...document.querySelectorAll(at)];
    buttons.at(step < 0 ? 0 : -1)?.focus();
  },
});

const pictures = startPictures(sendLabel);
const closeProbe = startProbe(
  $("thread"),
  (element) => current?.nodes[element.closest("[data-id]")?.dataset.id],
  (node, i, [text, logprob]) => {
    const tokens = [...node.tokens.slice(0, i), [text, logprob, node.tokens[i][2]]].filter((token) => token[0]);
    const branch = add(current, node.parent, node.role, tokens.map((token) => token[0]).join(""), tokens);
    if (text) run(current, branch);
    else branch.end = "stop"; // the alternative was to end here
    changed(current);
  },
  (node, i, signal) => lookInside(current, node, i, signal),
);

// -- answers ------------------------------------------------------------------------------------------------------------

async function run(conversation, node) {
  const abort = new AbortController();
  runs.set(node, { abort, conversation });
  const spoken = speaker(node);
  let cost = 0; // ms of the last drawing: a long answer is drawn less often
  let drawn = 0;
  let saved = performance.now();
  const draw = eachFrame(() => {
    const begun = performance.now();
    if (conversation !== current || !runs.has(node)) return;
    if (begun - drawn < 4 * cost) return draw();
    follow(() => thread.update(node));
    drawn = performance.now();
    cost = drawn - begun;
  });
  changed(conversation);
  toEnd();
  say("Answering");
  look?.();
  try {
    await generate(server, conversation, node, abort.signal, () => {
      draw();
      if (conversation === current) spoken(false);
      if (performance.now() - saved > 1500) {
        saved = performance.now();
        save(conversation, conversations);
      }
    });
  } catch (e) {
    if (e.name === "AbortError") node.end = "stopped";
    else if (e.code === undefined) throw e;
    else node.error = e.message;
  } finally {
    runs.delete(node);
    if (conversation === current) spoken(true);
    follow(() => changed(conversation));
    look?.();
  }
}

/** Says an answer to screen readers, sentence by sentence. */
function speaker(node) {
  let said = node.text.length;
  return (ended) => {
    const fresh = node.text.slice(said);
    const end = ended ? fresh.length : Math.max(...[". ", "! ", "? ", "\n"].map((mark) => fresh.lastIndexOf(mark) + 1));
    if (end > 0 && (ended || end > 60)) {
      say(fresh.slice(0, end));
      said += end;
    } else if (ended && node.end === "stopped") say("Stopped");
  };
}

const running = () => [...runs].find(([, { conversation }]) => conversation === current);
const stop = () => running()?.[1].abort.abort();

// -- showing ------------------------------------------------------------------------------------------------------------

/** Keep a conversation, and draw it if it is the one that is shown. */
function changed(conversation) {
  if (!conversations.includes(conversation) && Object.keys(conversation.nodes).length > 1) conversations.unshift(conversation);
  if (conversations.includes(conversation) && !save(conversation, conversations)) say("This browser has no room to keep the conversation");
  show();
}

function show() {
  const isText = current.mode === "text";
  const inside = $("thread").contains(document.activeElement);
  closeProbe();
  const empty = !last(current).parent;
  document.body.classList.toggle("is-text", isText);
  document.body.classList.toggle("is-empty", empty);
  thread.show(current, (node) => runs.has(node));
  const isBusy = (conversation) => [...runs.values()].some((r) => r.conversation === conversation);
  showConversations(conversations, current, isBusy, { open, remove: drop });
  for (const [id, on] of [["mode-chat", !isText], ["mode-text", isText]]) $(id).setAttribute("aria-pressed", String(on));
  const busy = running() !== undefined;
  $("send").hidden = busy;
  $("stop").hidden = !busy;
  $("say").placeholder = isText ? (empty ? "Begin a text" : "Write on, or let the model continue") : "Message";
  $("say-label").textContent = isText ? "Text" : "Message";
  pictures.allow(!isText && server.props?.modalities?.vision === true);
  sendLabel();
  if ($("system").value !== current.system) $("system").value = current.system;
  $("system-box").hidden = isText;
  document.title = current.title ? `${current.title} · pyggml` : "pyggml";
  showDefaults(server, current.mode);
  welcome(isText, empty);
  if (inside && document.activeElement === document.body) toField(); // what had the focus is there no more
}

function welcome(isText, empty) {
  $("welcome").hidden = !empty;
  if (!empty) return;
  $("welcome-title").textContent = isText ? "How does it begin?" : "What is on your mind?";
  const note = isText
    ? "The model goes on where you stop. Rest the mouse on a word to see what else it had in mind."
    : server.props?.has_chat_template === false
      ? "This model was not made for chats: Text suits it better."
      : "";
  $("welcome-note").textContent = note;
  const openings = OPENINGS.map((text) => h("button.opening", { type: "button", onclick: () => submit(text) }, text));
  $("openings").replaceChildren(...(isText ? openings : []));
}

function sendLabel() {
  const isText = current.mode === "text";
  const label = isText && !$("say").value ? "Continue" : "Send";
  $("send").setAttribute("aria-label", label);
  $("send").title = label;
  $("send").disabled = !$("say").value.trim() && !pictures.size && !(isText && last(current).parent);
}

/** Do something that may make the thread longer, and stay at its end if that is where one was. */
function follow(work) {
  const box = $("scroll");
  const atEnd = box.scrollHeight - box.scrollTop - box.clientHeight < 60;
  work();
  if (atEnd) toEnd();
}

function toEnd() {
  $("scroll").scrollTop = $("scroll").scrollHeight;
}

// -- conversations ------------------------------------------------------------------------------------------------------

function open(conversation) {
  current = conversation;
  settings.current = conversation.id;
  saveSettings();
  document.body.classList.remove("with-list");
  show();
  toEnd();
  toField();
}

/** Go to the message field; not by touch, where a keyboard would cover the page. */
function toField() {
  if (matchMedia("(hover: hover)").matches) $("say").focus({ preventScroll: true });
}

function begin(mode) {
  open(newConversation(mode, settings.system));
}

function drop(conversation) {
  const ask = $("delete");
  $("delete-what").textContent = conversation.title || "New conversation";
  ask.onclose = () => {
    if (ask.returnValue !== "delete") return;
    for (const { abort, conversation: c } of runs.values()) if (c === conversation) abort.abort();
    conversations = conversations.filter((c) => c !== conversation);
    forget(conversation);
    say("Deleted");
    if (conversation === current) begin(current.mode);
    else show();
  };
  ask.returnValue = "";
  ask.showModal();
}

// -- what the user does -------------------------------------------------------------------------------------------------

function submit(text) {
  if (running()) return;
  let above = last(current);
  const seen = pictures.taken();
  if (text.trim() || seen.length) {
    if (current.mode === "text" && above.parent) {
      const so = path(current).map((node) => node.text).join("");
      if (/\S$/.test(so) && /^[\p{L}\p{N}"“‘(]/u.test(text)) text = ` ${text}`;
    }
    above = add(current, above.id, "user", text);
    if (seen.length) above.pictures = seen;
    current.title ||= "Picture";
  } else if (current.mode === "chat" || !above.parent) return;
  $("say").value = "";
  grow();
  run(current, add(current, above.id, "assistant", ""));
}

function grow() {
  const area = $("say");
  area.style.height = "auto";
  area.style.height = `${Math.min(area.scrollHeight, innerHeight * 0.4)}px`;
}

$("composer").addEventListener("submit", (e) => {
  e.preventDefault();
  submit($("say").value);
});
$("say").addEventListener("input", () => {
  grow();
  sendLabel();
});
$("say").addEventListener("keydown", (e) => {
  if (e.key !== "Enter" || e.shiftKey || e.isComposing) return;
  e.preventDefault();
  if (!$("send").disabled) $("composer").requestSubmit();
});
$("stop").addEventListener("click", () => {
  stop();
  $("say").focus();
});
addEventListener("keydown", (e) => {
  if (e.key === "Escape" && !e.defaultPrevented && $("probe").hidden) stop();
});
for (const mode of ["chat", "text"]) {
  $(`mode-${mode}`).addEventListener("click", () => {
    if (current.mode === mode) return;
    const known = conversations.find((c) => c.mode === mode);
    if (last(current).parent && known) open(known);
    else begin(mode);
  });
}
$("new").addEventListener("click", () => begin(current.mode));
$("export").addEventListener("click", () => download(`${(current.title || "conversation").replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 40)}.json`, current));
$("theme").addEventListener("click", window.switchTheme);
$("theme").append(icon("moon"), icon("sun"));
$("system").addEventListener("input", () => {
  settings.system = current.system = $("system").value;
  saveSettings();
  if (conversations.includes(current)) save(current, conversations);
});
$("model").addEventListener("change", () => {
  current.model = settings.model = $("model").value;
  saveSettings();
  connect();
});

// -- the server ---------------------------------------------------------------------------------------------------------

addEventListener("needs-key", () => {
  if ($("key").open) return;
  $("key").returnValue = "";
  $("key").showModal();
});
$("key").addEventListener("close", () => {
  const key = $("key-text").value;
  $("key-text").value = "";
  if ($("key").returnValue !== "use") return;
  setKey(key);
  connect();
});

/** Ask what the server serves. */
async function connect() {
  $("offline").hidden = true;
  try {
    const { data } = await json("v1/models");
    server.models = data;
    const chosen = data.find((m) => m.id === (current?.model ?? settings.model)) ?? data[0];
    const several = data.length > 1;
    $("model").hidden = !several;
    $("model-name").hidden = several;
    $("model-name").textContent = name(chosen.id);
    $("model").replaceChildren(...data.map((m) => h("option", { value: m.id, selected: m === chosen }, name(m.id))));
    showModel(chosen);
    server.of = several ? `?model=${encodeURIComponent(chosen.id)}` : "";
    server.props = await json(`props${server.of}`); // which loads the model
    if (several) showModel((await json("v1/models")).data.find((m) => m.id === chosen.id));
    startSettings(server, () => {});
    if (!current || !last(current).parent) {
      current = newConversation(server.props.has_chat_template === false ? "text" : "chat", settings.system);
      if (several) current.model = chosen.id;
    }
    look ??= startStatus(() => runs.size > 0, () => `slots${server.of}`);
    look(true);
  } catch (e) {
    if (e.code === undefined) throw e;
    $("offline").hidden = false;
    $("offline-text").textContent = e.message;
  }
  current ??= newConversation("chat", settings.system);
  show();
}

/** A model's name without the folders and the ending of its file. */
const name = (id) => id.split("/").at(-1).replace(/\.gguf$/, "");

$("retry").addEventListener("click", connect);
for (const slot of document.querySelectorAll("[data-icon]")) slot.prepend(icon(slot.dataset.icon));
drawer($("list"), $("open-list"), "with-list");
const panel = drawer($("panel"), $("open-panel"), "with-panel");
$("slots").addEventListener("click", () => panel.open());
for (const [id, of] of [["close-list", "with-list"], ["close-panel", "with-panel"], ["shade", "with-list"], ["shade", "with-panel"]]) {
  $(id).addEventListener("click", () => {
    document.body.classList.remove(of);
    $(of === "with-list" ? "open-list" : "open-panel").setAttribute("aria-expanded", "false");
  });
}
await connect();
toEnd();
toField();
document.body.classList.add("ready");
