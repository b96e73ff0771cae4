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
  const messages = messagesBefore(conversation, shown);
  if (!node.text) return chat({ ...body, messages }, node, signal, changed);
  const prompt = await templated(server, { model, messages }, signal);
  return complete({ ...body, prompt: prompt + node.text }, node, signal, changed);
}

/** What the model held, layer by layer, before it wrote token `i` of `node`: an answer of /v1/inside. */
export async function lookInside(server, conversation, node, i, signal) {
  const shown = path(conversation, node.id);
  const model = conversation.model ?? undefined;
  const text = node.tokens.slice(0, i).map((token) => token[0]).join("");
  const before = conversation.mode === "text"
    ? shown.slice(0, -1).map((piece) => piece.text).join("")
    : await templated(server, { model, messages: messagesBefore(conversation, shown) }, signal);
  return json("v1/inside", { model, prompt: before + text }, signal);
}

/** The messages before the last of those that are shown. */
function messagesBefore(conversation, shown) {
  const before = shown.slice(0, -1).filter(({ text }) => text).map(({ role, text }) => ({ role, content: text }));
  return conversation.system.trim() ? [{ role: "system", content: conversation.system }, ...before] : before;
}

/** Messages as a prompt, without the token that the server writes before every prompt. */
async function templated(server, body, signal) {
  const { prompt } = await json("apply-template", body, signal);
  const bos = server.props?.bos_token;
  return bos && prompt.startsWith(bos) ? prompt.slice(bos.length) : prompt;
}

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
