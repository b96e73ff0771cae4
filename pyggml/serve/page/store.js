// What is kept in this browser: conversations, each under a key of its own, and settings.

const PREFIX = "pyggml.conversation.";
const SETTINGS = "pyggml.settings";

function read(key) {
  try {
    return JSON.parse(localStorage.getItem(key));
  } catch {
    return null;
  }
}

/** All conversations, the newest first. */
export function load() {
  const keys = Object.keys(localStorage).filter((key) => key.startsWith(PREFIX));
  const found = keys.map(read).filter((c) => c?.nodes?.root);
  return found.sort((a, b) => b.updated - a.updated);
}

/** Keep a conversation. When the browser has no more room, probabilities of tokens are dropped, of the oldest
    conversations first. False when even that does not help. */
export function save(conversation, all) {
  const oldest = [...all].sort((a, b) => a.updated - b.updated);
  for (;;) {
    try {
      localStorage.setItem(PREFIX + conversation.id, JSON.stringify(conversation));
      return true;
    } catch {
      const heavy = oldest.find((c) => Object.values(c.nodes).some((node) => node.tokens));
      if (!heavy) return false;
      for (const node of Object.values(heavy.nodes)) node.tokens = null;
      if (heavy !== conversation) localStorage.setItem(PREFIX + heavy.id, JSON.stringify(heavy));
    }
  }
}

export const forget = (conversation) => localStorage.removeItem(PREFIX + conversation.id);

export const settings = { sampling: {}, system: "", current: null, ...read(SETTINGS) };

/** Keep the settings. */
export function saveSettings() {
  try {
    localStorage.setItem(SETTINGS, JSON.stringify(settings));
  } catch {
    // a browser without room, or one that keeps nothing: the settings hold until the page is closed
  }
}
