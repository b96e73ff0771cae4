// From a message of the tree to a request, and from the parts of its stream to the text of the message.

import { events, json } from "./api.js";
import { settings } from "./store.js";
import { Aligner } from "./tokens.js";
import { path } from "./tree.js";

const N_TOP = 6; // alternatives that are asked for at each token
const N_TEXT = 128; // tokens by which a text is continued when nobody says how many

/** Continue the answer `node`, which may have a text already, and call `changed` whenever it has. Throws what the server
    reports, and AbortError when it was stopped. */
export async function generate(server, conversation, node, signal, changed) {
  const shown = path(conversation, node.id);
  const model = conversation.model ?? undefined;
  const body = { ...sampling(server, conversation), model, stream: true, timings_per_token: true };
  node.end = node.error = undefined;
  if (conversation.mode === "text") {
    const prompt = shown.map((piece) => piece.text).join("");
    return complete({ ...body, prompt }, node, signal, changed);
  }
  return chat({ ...body, ...begun(messagesBefore(conversation, shown), node.text, node.reasoning) }, node, signal, changed);
}

/** What the model held, layer by layer, before it wrote token `i` of `node`: an answer of /v1/inside, and the pictures
    that stand before. */
export async function lookInside(conversation, node, i, signal) {
  const shown = path(conversation, node.id);
  const model = conversation.model ?? undefined;
  const text = node.tokens.slice(0, i).map((token) => token[0]).join("");
  const before = shown.slice(0, -1);
  const asked = conversation.mode === "text"
    ? { prompt: before.map((piece) => piece.text).join("") + text }
    : begun(messagesBefore(conversation, shown), text, node.reasoning);
  return [await json("v1/inside", { model, ...asked }, signal), before.flatMap((piece) => piece.pictures ?? [])];
}

/** A chat whose answer has begun, if it has a text. */
function begun(messages, content, reasoning_content) {
  if (!content) return { messages };
  return { messages: [...messages, { role: "assistant", content, reasoning_content }], continue_final_message: "content" };
}

/** The messages before the last of those that are shown. */
function messagesBefore(conversation, shown) {
  const said = shown.slice(0, -1).filter(({ text, pictures }) => text || pictures);
  const before = said.map(({ role, text, pictures }) => ({ role, content: pictures ? parts(text, pictures) : text }));
  return conversation.system.trim() ? [{ role: "system", content: conversation.system }, ...before] : before;
}

const parts = (text, pictures) => [
  ...pictures.map((url) => ({ type: "image_url", image_url: { url } })),
  ...(text ? [{ type: "text", text }] : []),
];

/** The sampling fields of a request: those that were changed. */
function sampling(server, conversation) {
  const asked = { ...settings.sampling };
  if (conversation.mode === "text") asked.n_predict ??= defaultLength(server, "text");
  return asked;
}

/** How many tokens an answer has at most when nothing is filled in; -1: as many as there is room for. */
export function defaultLength(server, mode) {
  const n = server.props?.default_generation_settings?.params?.n_predict ?? -1;
  return n < 0 && mode === "text" ? N_TEXT : n;
}

async function chat(body, node, signal, changed) {
  const aligner = new Aligner();
  const request = { ...body, logprobs: true, top_logprobs: N_TOP };
  for await (const { choices, timings } of events("v1/chat/completions", request, signal)) {
    const choice = choices[0];
    if (!choice) continue;
    const { content, reasoning_content: thought } = choice.delta;
    append(node, content ?? "", aligner.take(content ?? "", choice.logprobs?.content));
    if (thought) node.reasoning = (node.reasoning ?? "") + thought;
    if (choice.finish_reason) node.end = choice.finish_reason;
    if (timings) node.timings = times(timings);
    changed();
  }
}

async function complete(body, node, signal, changed) {
  const aligner = new Aligner();
  for await (const part of events("completion", { ...body, n_probs: N_TOP }, signal)) {
    append(node, part.content, aligner.take(part.content, part.completion_probabilities));
    if (part.stop) node.end = part.stop_type === "limit" ? "length" : "stop";
    if (part.timings) node.timings = times(part.timings);
    changed();
  }
}

function append(node, text, tokens) {
  if (!text) return;
  if (!node.tokens) node.tokens = node.text ? [[node.text]] : [];
  node.tokens.push(...tokens);
  node.text += text;
}

const times = (t) => ({ n: t.predicted_n, rate: t.predicted_per_second, prompt: t.prompt_n, wait: t.prompt_ms });
