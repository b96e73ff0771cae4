// What the page asks of the server: JSON, streams of events, errors as the server words them, and the API key.

const KEY = "pyggml.key"; // kept until the tab is closed

/** An error that the server, or the way to it, reported. */
export class ServerError extends Error {
  constructor(code, message) {
    super(message);
    this.code = code;
  }
}

export const setKey = (key) => sessionStorage.setItem(KEY, key);

async function ask(path, body, signal) {
  const headers = {};
  const key = sessionStorage.getItem(KEY);
  if (key) headers.authorization = `Bearer ${key}`;
  if (body) headers["content-type"] = "application/json";
  let response;
  try {
    response = await fetch(path, { method: body ? "POST" : "GET", headers, body: body && JSON.stringify(body), signal });
  } catch (e) {
    if (e.name === "AbortError") throw e;
    throw new ServerError(0, "The server does not answer. Is it still running?");
  }
  if (response.ok) return response;
  const said = await response.json().catch(() => null);
  if (response.status === 401) dispatchEvent(new Event("needs-key"));
  throw new ServerError(response.status, said?.error?.message ?? `${response.status} ${response.statusText}`);
}

/** An answer in JSON. With a body the request is a POST. */
export async function json(path, body, signal) {
  return (await ask(path, body, signal)).json();
}

/** The events of a stream, as they come. */
export async function* events(path, body, signal) {
  const response = await ask(path, body, signal);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  try {
    for (;;) {
      let part;
      try {
        part = await reader.read();
      } catch (e) {
        if (e.name === "AbortError") throw e;
        throw new ServerError(0, "The connection to the server broke off.");
      }
      if (part.done) return;
      held += part.value;
      const whole = held.split("\n\n");
      held = whole.pop();
      for (const event of whole) {
        const data = event.split("\n").filter((line) => line.startsWith("data: ")).map((line) => line.slice(6)).join("\n");
        if (!data || data === "[DONE]") continue;
        const value = JSON.parse(data);
        if (value.error) throw new ServerError(value.error.code, value.error.message);
        yield value;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
