// The frame: pages by the part of the address after #, the list of runs, and what the server tells as it happens.

import { ask } from "./ask.js";
import { audit } from "./audit.js";
import { compare } from "./compare.js";
import { h, put } from "./dom.js";
import { plan } from "./plan.js";
import { watch } from "./watch.js";

const PAGES = { watch, compare, plan, audit };
const FIRST = 120; // runs that are asked for before the page is drawn; the others follow
const content = document.getElementById("content");

const studio = {
  rows: [],
  inAll: 0,
  onrows: null,
  source: null,
  asked: null, // the run that the first address names, asked for together with the list
  /** The page stands: now the rest of a long list may come. */
  async drawn() {
    performance.mark("drawn");
    if (this.rows.length >= this.inAll) return;
    const found = await ask("runs");
    Object.assign(this, { rows: found.runs, inAll: found.in_all });
    this.onrows?.();
  },
  /** Follow the list, and a run where `id` is given, from its point number `since` on. */
  listen(id, since = 0, onrun = null) {
    this.source?.close();
    this.source = new EventSource(`api/events${id ? `?id=${encodeURIComponent(id)}&since=${since}` : ""}`);
    this.source.addEventListener("rows", (event) => {
      const { changed, gone } = JSON.parse(event.data),
        now = new Map(this.rows.map((row) => [row.id, row]));
      gone.forEach((key) => now.delete(key));
      changed.forEach((row) => now.set(row.id, row));
      this.rows = [...now.values()].sort((a, b) => b.at - a.at || a.name.localeCompare(b.name));
      this.inAll = this.rows.length;
      this.onrows?.();
    });
    if (onrun) this.source.addEventListener("run", (event) => onrun(JSON.parse(event.data)));
  },
};

function route() {
  const [name, ...rest] = location.hash.slice(1).split("/").map(decodeURIComponent);
  const page = Object.hasOwn(PAGES, name) ? name : "watch";
  for (const link of document.querySelectorAll("nav a")) {
    if (link.hash === `#${page}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  document.title = `${page[0].toUpperCase()}${page.slice(1)} · Modicum studio`;
  studio.onrows = null;
  PAGES[page](content, studio, rest.filter(Boolean));
  scrollTo(0, 0);
}

function theme() {
  const button = document.getElementById("theme"),
    dark = matchMedia("(prefers-color-scheme: dark)");
  const shown = () => document.documentElement.dataset.theme ?? (dark.matches ? "dark" : "light");
  const draw = () => {
    button.textContent = shown() === "dark" ? "☀" : "☾";
  };
  button.addEventListener("click", () => {
    document.documentElement.dataset.theme = shown() === "dark" ? "light" : "dark";
    draw();
  });
  dark.addEventListener("change", draw);
  draw();
}

theme();
try {
  const named = location.hash.match(/^#watch\/(\w+)$/)?.[1];
  if (named) studio.asked = { id: named, run: ask(`run?id=${named}`).catch((error) => error) };
  const watched = /^(#watch.*)?$/.test(location.hash), // other pages want all of them
    found = await ask(watched ? `runs?first=${FIRST}` : "runs");
  Object.assign(studio, { rows: found.runs, inAll: found.in_all });
  document.querySelector(".where").textContent = found.folder;
  addEventListener("hashchange", route);
  route();
} catch (error) {
  put(content, h("p", { class: "error wait" }, error.message));
}
