// A chat with the server that this page comes from. Nothing is kept when it is closed.

const $ = (id) => document.getElementById(id);
const messages = [];
let stop = null;

function show(role, text) {
  const p = document.createElement("p");
  p.className = role;
  p.textContent = text;
  $("log").append(p);
  return p;
}

async function* deltas(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    held += value;
    const events = held.split("\n\n");
    held = events.pop();
    for (const event of events) {
      if (!event.startsWith("data: ") || event === "data: [DONE]") continue;
      const data = JSON.parse(event.slice(6));
      if (data.error) throw new Error(data.error.message);
      yield data.choices[0]?.delta ?? {};
    }
  }
}

async function answer() {
  const reply = { role: "assistant", content: "" };
  const shown = show("assistant", "");
  stop = new AbortController();
  $("send").hidden = true;
  $("stop").hidden = false;
  try {
    const response = await fetch("v1/chat/completions", {
      method: "POST",
      headers: { "content-type": "application/json" },
      body: JSON.stringify({ messages, stream: true }),
      signal: stop.signal,
    });
    if (!response.ok) throw new Error((await response.json()).error.message);
    for await (const delta of deltas(response)) {
      reply.content += delta.content ?? "";
      shown.textContent = reply.content;
      shown.scrollIntoView({ block: "end" });
    }
  } catch (e) {
    if (e.name !== "AbortError") show("error", e.message);
  }
  messages.push(reply);
  $("send").hidden = false;
  $("stop").hidden = true;
}

$("form").addEventListener("submit", (e) => {
  e.preventDefault();
  const content = $("text").value;
  $("text").value = "";
  messages.push({ role: "user", content });
  show("user", content);
  answer();
});
$("text").addEventListener("keydown", (e) => {
  if (e.key === "Enter" && !e.shiftKey) {
    e.preventDefault();
    $("form").requestSubmit();
  }
});
$("stop").addEventListener("click", () => stop?.abort());
fetch("v1/models")
  .then((r) => r.json())
  .then((list) => ($("model").textContent = list.data[0].id));
