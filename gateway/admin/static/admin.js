// Conveniences, without which every page but the playground works. Regions marked `data-live` are fetched again while nobody is typing in the
// page and the tab is seen; buttons marked `data-copy` copy the text of what they name.
"use strict";

const REFRESH_MS = 5000;

async function refresh() {
  const regions = [...document.querySelectorAll("[data-live]")];
  const busy = document.hidden || regions.some((region) => region.contains(document.activeElement) && region.querySelector(":focus-within form"));
  if (!regions.length || busy) return;
  let page;
  try {
    const reply = await fetch(location.href, { headers: { accept: "text/html" } });
    if (reply.redirected && new URL(reply.url).pathname.endsWith("/admin/login")) {
      location.reload();
      return;
    }
    if (!reply.ok) throw new Error(reply.status);
    page = new DOMParser().parseFromString(await reply.text(), "text/html");
  } catch {
    document.body.dataset.connection = "lost";
    return;
  }
  delete document.body.dataset.connection;
  for (const region of regions) {
    const next = page.getElementById(region.id);
    if (!next) continue;
    const open = [...region.querySelectorAll("details[id][open]")].map((details) => details.id);
    region.replaceWith(document.adoptNode(next));
    for (const id of open) document.getElementById(id)?.setAttribute("open", "");
  }
}

async function copy(button) {
  const source = document.querySelector(button.dataset.copy);
  const text = source.value ?? source.textContent;
  try {
    await navigator.clipboard.writeText(text.trim());
  } catch {
    getSelection().selectAllChildren(source); // no permission: leave it selected for the keyboard
    return;
  }
  const label = button.textContent;
  button.textContent = "Copied";
  setTimeout(() => { button.textContent = label; }, 1500);
}

const FACTS = { cache: "Cache", "miss-reason": "Why not by meaning", similarity: "Similarity", backend: "Deployment", "cost-usd": "Cost, $", "saved-usd": "Saved, $" };

function tell(facts, name, text) {
  facts.append(Object.assign(document.createElement("dt"), { textContent: name }), Object.assign(document.createElement("dd"), { textContent: text }));
}

// Asks at /v1 with the key that was typed, which is kept nowhere, and shows the answer as it comes; then why it came so.
async function ask(form) {
  const [answer, facts, fields] = [document.getElementById("answer"), document.getElementById("facts"), new FormData(form)];
  const body = { model: fields.get("model"), stream: true, messages: [{ role: "user", content: fields.get("prompt") }] };
  if (fields.get("fresh")) body.cache = { "no-cache": true };
  answer.textContent = "";
  facts.replaceChildren();
  const began = performance.now();
  const headers = { authorization: `Bearer ${fields.get("key")}`, "content-type": "application/json" };
  const reply = await fetch(form.getAttribute("action"), { method: "POST", headers, body: JSON.stringify(body) });
  for (const [name, label] of Object.entries(FACTS)) {
    const value = reply.headers.get(`x-sameway-${name}`);
    if (value) tell(facts, label, value);
  }
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let first;
  for (let read = await reader.read(); !read.done; read = await reader.read()) {
    const lines = (rest + read.value).split("\n");
    rest = reply.ok ? lines.pop() : rest + read.value;
    for (const line of reply.ok ? lines : []) {
      if (!line.startsWith("data: {")) continue;
      const event = JSON.parse(line.slice(6));
      const text = event.error?.message ?? event.choices?.[0]?.delta?.content ?? "";
      if (text) first ??= performance.now() - began;
      answer.append(text);
    }
  }
  if (!reply.ok) answer.textContent = JSON.parse(rest).error.message;
  tell(facts, "First word, all", `${Math.round(first ?? performance.now() - began)} ms, ${Math.round(performance.now() - began)} ms`);
  await explain(form, facts, reply.headers.get("x-request-id"));
}

async function explain(form, facts, id) {
  for (let tries = 0; tries < 10; tries += 1) { // a request is kept within a second of its end
    const page = await (await fetch(`${form.dataset.routes}?request_id=${id}`)).json();
    const route = page.routes?.[0];
    if (route) {
      if (route.why) tell(facts, "Route", route.why);
      for (const one of route.rejected) tell(facts, "Not", `${one.name}: ${one.reason}`);
      for (const one of route.stages) tell(facts, one.name, `${one.duration_ms.toFixed(1)} ms`);
      return;
    }
    await new Promise((done) => { setTimeout(done, 300); });
  }
}

document.addEventListener("submit", async (event) => {
  if (event.target.id !== "playground") return;
  event.preventDefault();
  const button = event.target.querySelector("button");
  button.disabled = true;
  try {
    await ask(event.target);
  } catch (error) {
    document.getElementById("answer").textContent = `The gateway did not answer: ${error.message}`;
  }
  button.disabled = false;
});
document.addEventListener("click", (event) => {
  const button = event.target.closest("[data-copy]");
  if (button) copy(button);
});
document.addEventListener("change", (event) => {
  if (event.target.closest("form[data-auto]")) event.target.form.requestSubmit();
});
for (const extra of document.querySelectorAll("form[data-auto] .without-script")) extra.hidden = true;
setInterval(refresh, REFRESH_MS);
