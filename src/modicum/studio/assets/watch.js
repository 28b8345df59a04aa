// One run at a time, finished or as it goes on.

import { ask } from "./ask.js";
import { choicePart } from "./choice.js";
import { h, put } from "./dom.js";
import { runList } from "./list.js";
import { lookPart } from "./look.js";
import { groupTable, keyFigures, runCharts, troubles } from "./run_view.js";

/** The page; `studio` holds the rows and tells of changes. Returns what stops it. */
export function watch(host, studio, [wanted]) {
  const id = wanted ?? studio.rows[0]?.id;
  const list = runList({
    rows: studio.rows,
    inAll: studio.inAll,
    chosen: id ? [id] : [],
    link: (row) => `#watch/${row.id}`,
  });
  const body = h("section", { class: "body fold", "aria-label": "The run" });
  put(
    host,
    h(
      "div",
      { class: `split ${wanted ? "chosen" : ""}` },
      h("aside", { class: "side fold", "aria-label": "Runs" }, list.element),
      body,
    ),
  );
  studio.onrows = () => list.update(studio.rows);
  if (!id)
    body.append(
      h(
        "p",
        { class: "empty" },
        "There is no run in this folder yet. ",
        h("code", {}, "modicum demo --out FOLDER/demo"),
        " makes some; they appear here as they begin.",
      ),
    );
  else open(body, studio, id);
}

async function open(body, studio, id) {
  let run;
  try {
    run = await first(studio, id);
  } catch (error) {
    put(body, h("p", { class: "error" }, error.message));
    studio.drawn();
    return;
  }
  const head = h("div"),
    charts = h("div"),
    foot = h("div");
  put(body, h("a", { class: "button back", href: "#watch" }, "All runs"), head, charts, foot);
  const drawn = runCharts(charts, run);
  const draw = () => {
    header(head, run);
    drawn.update(run);
    footer(foot, run);
  };
  draw();
  studio.drawn();
  if (run.about.state === "finished" && !run.more) {
    studio.listen(null);
    return;
  }
  studio.listen(id, run.points.length, (news) => {
    if (news.since === 0) run = { ...run, ...news };
    else run = { ...run, ...news, points: [...run.points.slice(0, news.since), ...news.points] };
    draw();
    if (!run.more) performance.mark("whole");
  });
}

/** The run of the first address was asked for before; a refusal is raised again. */
async function first(studio, id) {
  const asked = studio.asked?.id === id ? await studio.asked.run : null;
  studio.asked = null;
  if (asked instanceof Error) throw asked;
  return asked ?? ask(`run?id=${encodeURIComponent(id)}`);
}

function header(head, run) {
  const { about, points } = run,
    planned = about.rounds_planned,
    share = planned ? Math.min(1, points.length / planned) : 0;
  put(
    head,
    h("h1", {}, [about.method, about.dataset].filter(Boolean).join(" on ") || about.name),
    h(
      "div",
      { class: "lead" },
      h("span", { class: `state ${about.state}` }, about.state),
      h("span", {}, about.name),
      about.model ? h("span", {}, about.model) : null,
      about.seed !== null ? h("span", {}, `seed ${about.seed}`) : null,
      about.deployed ? h("span", {}, "deployed") : null,
    ),
    about.state === "running" && planned
      ? h(
          "div",
          {
            class: "progress",
            role: "progressbar",
            "aria-valuemin": 0,
            "aria-valuemax": planned,
            "aria-valuenow": points.length,
            "aria-label": "Rounds",
          },
          bar(share),
        )
      : null,
    about.said ? h("p", { class: "error" }, about.said) : null,
    run.problem ? h("p", { class: "error" }, run.problem) : null,
    run.silo || run.choice ? null : keyFigures(run),
    about.simulation
      ? h(
          "p",
          { class: "note-line" },
          "A simulation: noise comes from a seed and protects nobody. What is drawn as ground truth, only a simulator can see.",
        )
      : null,
    points.length || run.silo?.rounds?.length || run.choice ? null : h("p", { class: "empty" }, "No round is finished yet."),
    ...charges(run.silo, planned),
  );
}

/** What a silo's own ledger has charged, round by round. */
function charges(silo, planned) {
  if (!silo?.rounds?.length) return [];
  const left = silo.left === null ? "" : `; ${Math.floor(100 * silo.left)}% of the plan is left`,
    of = planned ? ` of ${planned}` : "";
  return [
    h("h2", {}, "Charged by this silo"),
    h("p", { class: "note-line" }, `${silo.rounds.length}${of} rounds${left}. From its own ledger; modicum silo account says what is left over all runs.`),
    h(
      "table",
      {},
      h("thead", {}, h("tr", {}, h("th", {}, "Round"), h("th", {}, "Releases"))),
      h("tbody", {}, ...silo.rounds.map((one) => h("tr", {}, h("td", {}, one.round), h("td", {}, one.releases)))),
    ),
  ];
}

function bar(share) {
  const inner = h("div");
  inner.style.width = `${100 * share}%`;
  return inner;
}

function footer(foot, run) {
  const open = new Set([...foot.querySelectorAll("details[open] > summary")].map((one) => one.textContent));
  const { about, groups } = run,
    certified = groups.length && groups[0].epsilon;
  put(
    foot,
    run.choice ? choicePart(run.choice) : null,
    run.look ? lookPart(run.look) : null,
    certified ? h("h2", {}, "By budget") : null,
    certified ? groupTable(groups, about.score !== null, about.main) : null,
    certified && about.score !== null
      ? h(
          "p",
          { class: "note-line" },
          "* simulated: mean over the group's clients, each on its own test records",
        )
      : null,
    troubles(run),
    about.note ? h("p", { class: "note-line" }, about.note) : null,
    run.config ? h("details", {}, h("summary", {}, "Settings"), h("pre", {}, run.config)) : null,
    about.certified
      ? h("p", {}, h("a", { class: "button", href: `#audit/${about.id}` }, "Audit this run"))
      : null,
  );
  for (const one of foot.querySelectorAll("details")) if (open.has(one.firstChild.textContent)) one.open = true;
}
