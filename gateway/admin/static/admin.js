// Conveniences, without which every page but the playground works. Regions marked `data-live` are fetched again while nobody is typing in the
// page and the tab is seen; a list marked `data-tail` gets what came after its value, in front; buttons marked `data-copy` copy the text of
// what they name.
"use strict";

const REFRESH_MS = 5000;
const TAIL_MS = 400;
const TAIL_MAX = 500; // rows; the oldest go

// The document at a URL of the dashboard; undefined while the gateway does not answer. Without a session it leads to the login.
async function fetched(url) {
  try {
    const reply = await fetch(url, { headers: { accept: "text/html" } });
    if (reply.redirected && new URL(reply.url).pathname.endsWith("/admin/login")) {
      location.reload();
      return undefined;
    }
    if (!reply.ok) throw new Error(reply.status);
    const page = new DOMParser().parseFromString(await reply.text(), "text/html");
    delete document.body.dataset.connection;
    return page;
  } catch {
    document.body.dataset.connection = "lost";
    return undefined;
  }
}

async function refresh() {
  const regions = [...document.querySelectorAll("[data-live]")];
  const busy = document.hidden || regions.some((region) => region.contains(document.activeElement) && region.querySelector(":focus-within form"));
  if (!regions.length || busy) return;
  const page = await fetched(location.href);
  for (const region of page ? regions : []) {
    const next = page.getElementById(region.id);
    if (!next) continue;
    patch(region, next);
  }
}

// Changes what differs and keeps the nodes, so that what is focused, selected, open and scrolled to stays so.
function patch(old, fresh) {
  if (old.isEqualNode(fresh)) return;
  if (old.nodeName !== fresh.nodeName || old.id !== fresh.id) {
    old.replaceWith(fresh);
    return;
  }
  if (old.nodeType !== Node.ELEMENT_NODE) {
    old.data = fresh.data;
    return;
  }
  for (const { name } of [...old.attributes]) if (!fresh.hasAttribute(name) && name !== "open") old.removeAttribute(name);
  for (const { name, value } of fresh.attributes) if (old.getAttribute(name) !== value) old.setAttribute(name, value);
  const [was, now] = [[...old.childNodes], [...fresh.childNodes]];
  now.forEach((node, at) => (was[at] ? patch(was[at], node) : old.append(node)));
  for (const node of was.slice(now.length)) node.remove();
}

// What is there stays as it is: what is open, focused, selected or scrolled to.
async function tail() {
  const list = document.querySelector("[data-tail]:not([data-paused])");
  if (!list || document.hidden) return;
  const url = new URL(location.href);
  url.searchParams.set("after", list.dataset.tail);
  const newer = (await fetched(url))?.querySelector("[data-tail]");
  if (!newer) return;
  list.dataset.tail = newer.dataset.tail;
  list.prepend(...[...newer.children].filter((row) => !row.id || !document.getElementById(row.id)));
  while (list.children.length > TAIL_MAX) {
    list.lastElementChild.remove();
    document.querySelector(".pager")?.remove();
  }
}

function every(pause_ms, step) {
  setTimeout(async () => {
    await step();
    every(pause_ms, step);
  }, pause_ms);
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
    const reply = await fetch(`${form.dataset.routes}?request_id=${id}`);
    if (reply.status === 403) return; // one's roles show no requests
    const route = (await reply.json()).routes?.[0];
    if (route) {
      if (route.why) tell(facts, "Route", route.why);
      for (const one of route.rejected) tell(facts, "Not", `${one.name}: ${one.reason}`);
      for (const one of route.stages) tell(facts, one.name, `${one.duration_ms.toFixed(1)} ms`);
      return;
    }
    await new Promise((done) => { setTimeout(done, 300); });
  }
}

const PORTION_BYTES = 4 << 20;

// Sends a file of JSON lines to the cache, some whole lines at a time, and shows how far it is.
async function importFile(form) {
  const [file, bar, result] = [form.elements.file.files[0], form.querySelector("progress"), form.querySelector("[role=status]")];
  const [query, sums, problems] = [new URLSearchParams({ team_id: form.elements.team_id.value }), { lines: 0, stored: 0, unchanged: 0, refused: 0 }, []];
  Object.assign(bar, { hidden: false, max: file.size || 1, value: 0 });
  for (let [at, size] = [0, PORTION_BYTES]; at < file.size;) {
    const read = new Uint8Array(await file.slice(at, at + size).arrayBuffer());
    const length = at + read.length < file.size ? read.lastIndexOf(10) + 1 : read.length;
    if (!length) { // a line that is longer
      size *= 2;
      continue;
    }
    const reply = await fetch(`${form.getAttribute("action")}?${query}`, { method: "POST", headers: { "content-type": "application/x-ndjson" }, body: read.subarray(0, length) });
    const part = await reply.json();
    if (!reply.ok) throw new Error(`${part.error.message} Import the file again: what is there already changes nothing.`);
    problems.push(...part.problems.map((one) => `Line ${sums.lines + one.line}: ${one.message}`));
    for (const name of Object.keys(sums)) sums[name] += part[name];
    at += length;
    bar.value = at;
    result.textContent = `${sums.lines} lines: ${sums.stored} stored, ${sums.unchanged} there already, ${sums.refused} refused.`;
  }
  for (const problem of problems.slice(0, 20)) result.append(document.createElement("br"), problem);
}

const ASKS = { playground: [ask, "#answer"], import: [importFile, "#import [role=status]"] };

document.addEventListener("submit", async (event) => {
  const [act, shown] = ASKS[event.target.dataset.asks] ?? [];
  if (!act) return;
  event.preventDefault();
  const button = event.target.querySelector("button");
  button.disabled = true;
  try {
    await act(event.target);
  } catch (error) {
    document.querySelector(shown).textContent = `It failed: ${error.message}`;
  }
  button.disabled = false;
});
document.addEventListener("click", (event) => {
  const button = event.target.closest("[data-copy]");
  if (button) copy(button);
  const pause = event.target.closest("[data-pause]");
  if (pause) pause.textContent = document.querySelector("[data-tail]").toggleAttribute("data-paused") ? "Go on" : "Pause";
});
document.addEventListener("change", (event) => {
  if (event.target.closest("form[data-auto]") && event.target.type !== "date") event.target.form.requestSubmit();
});
for (const extra of document.querySelectorAll("form[data-auto] .without-script")) extra.hidden = true;
for (const pause of document.querySelectorAll("[data-pause]")) pause.hidden = !document.querySelector("[data-tail]");
every(REFRESH_MS, refresh);
every(TAIL_MS, tail);
