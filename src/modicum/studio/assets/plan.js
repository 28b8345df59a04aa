// Before a run: what noise the budgets ask for, ε by round, and what to expect. Ends in a file to copy.

import { ask, lines, post } from "./ask.js";
import { chart } from "./charts.js";
import { epsilon, h, number, percent, put, table } from "./dom.js";
import { term } from "./glosses.js";
import { groupColour } from "./run_view.js";

const wish = {
  dataset: "digits",
  clients: 20,
  partition: "iid",
  budgets: [1, 3, 8],
  delta: 1e-5,
  method: "dp-sgd",
  view: null,
  model: "logistic",
  rounds: 25,
  per_round: null,
  lr: null,
};
let running = null;

/** The page. */
export async function plan(host, studio) {
  const body = h("section", { class: "body", "aria-label": "The plan" }),
    form = h("form", { "aria-label": "What is wished for", onsubmit: (event) => event.preventDefault() });
  put(
    host,
    h("div", { class: "split chosen" }, h("aside", { class: "side", "aria-label": "Wishes" }, form), body),
  );
  studio.listen(null);
  let waiting;
  const changed = () => {
    clearTimeout(waiting);
    running?.abort();
    waiting = setTimeout(() => show(body), 350);
  };
  try {
    fields(form, await ask("choices"), changed);
    await show(body);
  } catch (error) {
    put(body, h("p", { class: "error" }, error.message));
  }
}

function fields(form, choices, changed) {
  const field = (words, input) => h("label", {}, h("span", {}, words), input);
  const set = (name, read) => (event) => {
    wish[name] = read(event.target.value);
    changed();
  };
  const whole = (text) => (text.trim() === "" ? null : Number(text));
  const select = (name, options, onchange) => {
    const made = h(
      "select",
      { id: name, onchange },
      options.map((o) => h("option", { value: o.value ?? o, title: o.title }, o.label ?? o)),
    );
    made.value = wish[name] ?? "";
    return made;
  };
  const about = h("span", { class: "note-line" });
  const view = select(
    "view",
    [{ value: "", label: "the method's own" }, ...choices.views],
    set("view", (text) => text || null),
  );
  const method = () => {
    const one = choices.methods.find((m) => m.name === wish.method);
    about.textContent = one?.line ?? "";
    view.disabled = !one?.views;
    if (view.disabled) {
      wish.view = null;
      view.value = "";
    }
  };
  const number_ = (name, attributes = {}) => {
    const made = h("input", {
      type: "number",
      id: name,
      min: 1,
      step: 1,
      ...attributes,
      oninput: set(name, whole),
    });
    made.value = wish[name] ?? "";
    return made;
  };
  const budgets = h("input", {
    type: "text",
    id: "budgets",
    inputmode: "decimal",
    oninput: set("budgets", (text) =>
      text
        .split(/[,;\s]+/)
        .filter(Boolean)
        .map((one) => (/^(inf|∞)$/.test(one) ? null : Number(one))),
    ),
  });
  budgets.value = wish.budgets.map(epsilon).join(", ");
  form.append(
    field("Budgets ε, dealt to clients in turn", budgets),
    h("div", { class: "two" }, field("Clients", number_("clients")), field("Rounds", number_("rounds"))),
    h(
      "div",
      { class: "two" },
      field("Clients a round", number_("per_round", { placeholder: "all" })),
      field("δ", number_("delta", { step: "any", min: 0 })),
    ),
    field(
      "Method",
      select(
        "method",
        choices.methods.map((m) => m.name),
        (event) => {
          wish.method = event.target.value;
          method();
          changed();
        },
      ),
    ),
    about,
    field("Who looks on (view)", view),
    field("Model", select("model", choices.models, set("model", String))),
    field(
      "Public records that stand for yours",
      select(
        "dataset",
        choices.datasets.map((d) => ({ value: d.name, title: d.line })).map((d) => ({ ...d, label: d.value })),
        set("dataset", String),
      ),
    ),
    h(
      "div",
      { class: "two" },
      field(
        "Divided",
        select("partition", ["iid", "dirichlet:0.5", "dirichlet:0.1", "size-skew:4"], set("partition", String)),
      ),
      field("Learning rate", number_("lr", { step: "any", min: 0, placeholder: "default" })),
    ),
  );
  method();
}

async function show(body) {
  let found;
  try {
    if (!wish.budgets.length || wish.budgets.some((b) => Number.isNaN(b)))
      throw new Error("Budgets are numbers, such as 0.5, 1, 8.");
    found = await post("plan", wish);
  } catch (error) {
    put(body, h("h1", {}, "Plan"), h("p", { class: "error", role: "alert" }, error.message));
    return;
  }
  const cost = h("div"),
    hope = h("div"),
    told = h("p", { class: "note-line", role: "status" });
  const begin = h(
    "button",
    { class: "button first", type: "button", onclick: () => expect(begin, hope, told) },
    "Simulate on public records",
  );
  put(
    body,
    h("h1", {}, "Plan"),
    h("p", {}, found.sentence, ` δ = ${number(found.delta)}.`),
    table(
      ["ε granted", "clients", "noise multiplier", "releases of a client", "sampling"],
      found.groups.map((g) => [
        epsilon(g.budget),
        String(g.clients),
        g.noise
          ? [...new Set(g.noise.map((v) => number(v)))].join(" – ")
          : g.budget === null
            ? "none"
            : "adapts",
        g.releases === null ? "–" : g.releases.toLocaleString("en"),
        sampling(g.samplers),
      ]),
    ),
    h(
      "p",
      { class: "note-line" },
      `${found.parameters.toLocaleString("en")} parameters; ${found.records[0] === found.records[1] ? found.records[0] : `${found.records[0]} to ${found.records[1]}`} records a client. `,
      ...term("noise multiplier", "What is a noise multiplier?"),
    ),
    h("div", { class: "charts" }, cost, hope),
    begin,
    told,
    h("h2", {}, "The experiment file"),
    toml(found.toml),
  );
  const priced = found.groups.filter((g) => g.by_round.length);
  if (priced.length)
    chart(cost, {
      title: "ε by round",
      note: "of everything planned up to that round",
      y: "number",
      zero: true,
      series: priced.map((g, i) => ({
        name: `ε = ${epsilon(g.budget)}`,
        colour: groupColour(i, priced.length),
        points: g.by_round,
      })),
    });
  performance.mark("drawn");
}

const sampling = (all) =>
  [
    ...new Set(
      all.map((one) =>
        one.kind === "poisson"
          ? `${percent(one.rate)} of records`
          : one.kind === "none"
            ? "none"
            : "shuffled passes",
      ),
    ),
  ]
    .slice(0, 2)
    .join(", ") || "–";

function toml(text) {
  const copy = h(
    "button",
    {
      class: "button",
      type: "button",
      onclick: async () => {
        await navigator.clipboard.writeText(text);
        copy.textContent = "Copied";
      },
    },
    "Copy",
  );
  return h(
    "div",
    { class: "toml" },
    copy,
    h("pre", { id: "toml", tabindex: 0 }, text),
    h(
      "p",
      { class: "note-line" },
      "Save it as experiment.toml, put your own records under [data], and ",
      h("code", {}, "modicum run experiment.toml"),
      ".",
    ),
  );
}

/** Accuracy by round of a few seeds as they are simulated, one line a seed and at last their mean with a band. */
async function expect(begin, hope, told) {
  running?.abort();
  running = new AbortController();
  const { signal } = running,
    seeds = new Map();
  begin.disabled = true;
  let drawn = null,
    said = "";
  const spec = (done) => ({
    title: "Expected test accuracy",
    note: `simulated on ${wish.dataset}, which is public`,
    y: "percent",
    zero: true,
    top: 1,
    series: done
      ? [banded([...seeds.values()])]
      : [...seeds].map(([seed, points]) => ({ name: `seed ${seed}`, colour: `var(--p${seed})`, points })),
  });
  try {
    for await (const line of lines("expect", wish, signal)) {
      if (line.error) throw new Error(line.error);
      if (line.stopped) {
        said = `${line.stopped}; `;
        continue;
      }
      if (!seeds.has(line.seed)) seeds.set(line.seed, []);
      const value = line.personalised_accuracy ?? line.test_accuracy;
      if (value !== undefined) seeds.get(line.seed).push([line.round, value]);
      told.textContent = `Simulating, seed ${line.seed}, round ${line.round} …`;
      if (value === undefined) continue;
      if (drawn) drawn.update(spec(false));
      else drawn = chart(hope, spec(false));
    }
    const ends = [...seeds.values()].map((points) => points.at(-1)?.[1]).filter((v) => v !== undefined);
    drawn?.update(spec(true));
    told.textContent = ends.length
      ? `${said}${percent(Math.min(...ends))} – ${percent(Math.max(...ends))} over ${ends.length} ${ends.length === 1 ? "seed" : "seeds"} on ${wish.dataset}. Your records will differ.`
      : "This dataset has no test records to look at.";
  } catch (error) {
    if (error.name !== "AbortError") told.textContent = error.message;
  }
  begin.disabled = false;
}

function banded(seeds) {
  const rounds = [...new Set(seeds.flatMap((points) => points.map((p) => p[0])))].sort((a, b) => a - b);
  const at = (round) =>
    seeds.map((points) => points.find((p) => p[0] === round)?.[1]).filter((v) => v !== undefined);
  return {
    name: "mean of seeds",
    colour: "var(--p0)",
    points: rounds.map((r) => [r, at(r).reduce((a, b) => a + b, 0) / at(r).length]),
    band: rounds.map((r) => [r, Math.min(...at(r)), Math.max(...at(r))]),
  };
}
