// A conversation is a tree of messages. Each message remembers which of its answers is shown; the path of these from the
// root is what one sees. A text that is continued is a tree of pieces in the same way.

const newId = () => crypto.getRandomValues(new Uint32Array(2)).reduce((id, n) => id + n.toString(36), "");
const ROOT = "root";

/** An empty conversation. `mode`: "chat", or "text". */
export function newConversation(mode, system = "") {
  const root = { id: ROOT, parent: null, role: "root", text: "", children: [], pick: 0 };
  return { id: newId(), title: "", mode, system, model: null, created: Date.now(), updated: Date.now(), nodes: { root } };
}

/** Add a message below another one, and show it. `tokens`: what its text is made of (see tokens.js), if known. */
export function add(conversation, parent, role, text, tokens = null) {
  const node = { id: newId(), parent, role, text, tokens, children: [], pick: 0 };
  const above = conversation.nodes[parent];
  conversation.nodes[node.id] = node;
  above.pick = above.children.push(node.id) - 1;
  conversation.updated = Date.now();
  if (!conversation.title && role === "user") conversation.title = text.trim().replace(/\s+/g, " ").slice(0, 80);
  return node;
}

/** The messages that are shown, or those up to one of them. */
export function path(conversation, until = null) {
  const shown = [];
  let node = conversation.nodes[ROOT];
  while (node.children.length && node.id !== until) {
    node = conversation.nodes[node.children[node.pick]];
    shown.push(node);
  }
  return shown;
}

/** The last message that is shown; the root when there is none. */
export const last = (conversation) => path(conversation).at(-1) ?? conversation.nodes[ROOT];

/** Where a message stands among those it can be exchanged for: [its number from 0, how many there are]. */
export function place(conversation, node) {
  const { children } = conversation.nodes[node.parent];
  return [children.indexOf(node.id), children.length];
}

/** Show the message that is `step` after this one among those it can be exchanged for. */
export function turn(conversation, node, step) {
  const above = conversation.nodes[node.parent];
  above.pick = Math.min(Math.max(above.children.indexOf(node.id) + step, 0), above.children.length - 1);
  return conversation.nodes[above.children[above.pick]];
}
