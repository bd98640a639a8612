// Two conveniences; every page works without them. Regions marked `data-live` are fetched again while nobody is typing in the
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

document.addEventListener("click", (event) => {
  const button = event.target.closest("[data-copy]");
  if (button) copy(button);
});
document.addEventListener("change", (event) => {
  if (event.target.closest("form[data-auto]")) event.target.form.requestSubmit();
});
for (const extra of document.querySelectorAll("form[data-auto] .without-script")) extra.hidden = true;
setInterval(refresh, REFRESH_MS);
