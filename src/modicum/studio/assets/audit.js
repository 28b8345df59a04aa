// What is protected from whom, and whether the certificate follows from the ledger.

import { ask } from "./ask.js";
import { epsilon, h, number, percent, put, table } from "./dom.js";
import { glossary, term } from "./glosses.js";
import { runList } from "./list.js";

/** The page; a run of the folder may be named in the address, others are dropped onto it. */
export function audit(host, studio, [wanted]) {
  const body = h("section", { class: "body", "aria-label": "Audit" });
  const list = runList({
    rows: studio.rows.filter((row) => row.certified),
    chosen: wanted ? [wanted] : [],
    link: (row) => `#audit/${row.id}`,
  });
  const side = h(
    "aside",
    { class: "side", "aria-label": "What to audit" },
    dropZone(body),
    h(
      "details",
      { open: !wanted || matchMedia("(min-width: 52rem)").matches },
      h("summary", {}, "Runs of this folder"),
      list.element,
    ),
  );
  put(host, h("div", { class: "split chosen" }, side, body));
  studio.onrows = () => list.update(studio.rows.filter((row) => row.certified));
  studio.listen(null);
  if (wanted) examine(body, () => ask(`audit?id=${encodeURIComponent(wanted)}`));
  else intro(body);
}

async function intro(body) {
  put(
    body,
    h("h1", {}, "Audit"),
    h(
      "p",
      {},
      "Drop a run folder, or its certificate.json and ledger.sqlite, or choose a run. Every ε is then recomputed from the ledger alone, by our accountant and by another library. What you drop is checked by the studio on this machine, and then forgotten.",
    ),
    await over(),
    h("h2", {}, "The words"),
    glossary(),
  );
}

async function examine(body, question) {
  put(body, h("p", { class: "quiet", role: "status" }, "Recomputing every ε from the ledger …"));
  try {
    const found = await question();
    put(body, ...(await report(found)));
    performance.mark("drawn");
  } catch (error) {
    put(body, h("h1", {}, "Audit"), h("p", { class: "error", role: "alert" }, error.message));
  }
}

async function report({ name, checked, certificate }) {
  const used = [
    "ε",
    "δ",
    "unit",
    "adjacency",
    "view",
    "budget",
    "certified ε",
    "guard",
    "accountant",
    "second opinion",
    "ledger",
    "head",
    "account",
  ];
  return [
    h(
      "div",
      { class: "lead" },
      h(
        "h1",
        {},
        "Audit ",
        h("span", { class: "quiet" }, certificate ? `of run ${certificate.run}` : "of a ledger"),
      ),
      name ? h("span", {}, name) : null,
      h("button", { class: "button", type: "button", onclick: () => print() }, "Print"),
    ),
    // What nobody was protected by stands before any match, as `modicum verify` prints it.
    (certificate?.simulation ?? checked?.simulation)
      ? h(
          "p",
          { class: "simulated" },
          h("b", {}, "Simulation. "),
          "Noise came from a seed, so this run protected nobody. Its figures are those of the same run deployed with cryptographic noise.",
        )
      : null,
    verdict(checked, certificate),
    checked?.problems.length
      ? h(
          "div",
          {},
          h("h2", {}, "What does not agree"),
          h(
            "ul",
            {},
            checked.problems.map((text) => h("li", {}, text)),
          ),
          checked.problems_in_all > checked.problems.length
            ? h("p", { class: "quiet" }, `and ${checked.problems_in_all - checked.problems.length} more`)
            : null,
        )
      : null,
    certificate ? h("h2", {}, "What is promised to whom") : null,
    ...(certificate ? certificate.promises.map(promise) : []),
    certificate ? h("h2", {}, "This rests on") : null,
    certificate
      ? h(
          "ul",
          { class: "assumptions" },
          certificate.assumptions.map((text) =>
            h(
              "li",
              {},
              text.replace(/^SIMULATION: ./, (start) => start.at(-1).toUpperCase()),
            ),
          ),
        )
      : null,
    certificate?.audit ? measured(certificate.audit) : null,
    h("h2", {}, "Over several runs"),
    certificate
      ? h(
          "p",
          {},
          certificate.account.sentence,
          certificate.account.kept && certificate.account.cap
            ? ` This run drew ${percent(certificate.account.drawn / certificate.account.cap)} of it.`
            : "",
        )
      : null,
    await over(),
    h(
      "p",
      { class: "note-line" },
      ...term("head", "Ledger head"),
      " ",
      h("code", {}, (certificate ?? checked).head),
      ` · ${(certificate ?? checked).entries.toLocaleString("en")} entries`,
    ),
    h("h2", {}, "The words"),
    glossary(used),
  ].filter(Boolean);
}

function verdict(checked, certificate) {
  const box = (colour, word, text) =>
    h("div", { class: "verdict", colour, role: "status" }, h("b", {}, word), h("p", {}, text));
  if (!checked)
    return box(
      "var(--warm)",
      "Not recomputed",
      "A certificate alone can be read, but not checked: drop its ledger.sqlite with it.",
    );
  if (!checked.match)
    return box(
      "var(--bad)",
      "Does not match",
      checked.certificate
        ? `The certificate does not follow from the ledger: ${checked.problems_in_all} ${checked.problems_in_all === 1 ? "problem" : "problems"}.`
        : "The ledger is not sound.",
    );
  if (!checked.certificate)
    return box(
      "var(--good)",
      "Sound",
      "The ledger's chain and every charge in it are in order. No certificate was given to compare it with.",
    );
  return box(
    "var(--good)",
    "Matches",
    `Every figure for all ${certificate.clients.toLocaleString("en")} clients follows from the ledger, by two accountants. That says certificate and ledger agree, not that anybody is protected: read on.`,
  );
}

function promise(one) {
  if (!one.private)
    return h(
      "div",
      { class: "promise" },
      h("h3", {}, `No privacy for ${one.clients} ${one.clients === 1 ? "client" : "clients"}`),
      h("p", {}, one.sentence),
    );
  const worst = one.groups
    .map((g) => g.epsilon[1])
    .reduce((a, b) => (a === null || b === null ? null : Math.max(a, b)));
  const range = (r) =>
    r === null ? "–" : epsilon(r[0]) === epsilon(r[1]) ? epsilon(r[1]) : `${epsilon(r[0])} – ${epsilon(r[1])}`;
  const factor = (value) => (value > 12 ? "any practical number of" : number(Math.exp(value)));
  const strict = one.groups[0].epsilon[1];
  const odds =
    `With or without that ${one.unit}, nothing they see becomes more than ${factor(strict)} times as likely` +
    (epsilon(strict) === epsilon(worst)
      ? "."
      : ` where ε = ${epsilon(strict)}, and ${factor(worst)} times where ε = ${epsilon(worst)}.`) +
    (worst > 3 ? " Large factors are weak promises." : "");
  const how = {
    "zero-out": "whether its contribution was real or blanked out",
    "add-remove": "whether it took part at all",
    "replace-one": "which of two values it had",
  }[one.adjacency];
  return h(
    "div",
    { class: "promise" },
    h(
      "dl",
      {},
      h("dt", {}, ...term("unit", "Protected")),
      h(
        "dd",
        {},
        one.unit === "record" ? "each single record of a client" : "each client with all of its records",
        `: ${how}`,
      ),
      h("dt", {}, ...term("view", "From whom")),
      h("dd", {}, one.adversary),
      h("dt", {}, ...term("ε", "How well")),
      h("dd", {}, odds, " ", ...term("δ", `δ = ${number(one.delta)}`)),
      h("dt", {}, ...term("guard", "Kept by")),
      h("dd", {}, `${one.guards.join(", ")}; `, ...term("accountant", one.accountants.join(", "))),
    ),
    table(
      ["ε granted", "clients", "ε certified", "recomputed", "second opinion", "releases"],
      one.groups.map((g) => [
        epsilon(g.budget),
        String(g.clients),
        range(g.epsilon),
        range(g.recomputed),
        range(g.second),
        g.made.toLocaleString("en") + (g.planned ? ` of ${g.planned.toLocaleString("en")}` : ""),
      ]),
    ),
  );
}

function measured(found) {
  return h(
    "div",
    {},
    h("h2", {}, "What was measured"),
    found.broken ? h("p", { class: "error" }, "More was proved than is claimed: do not use this.") : null,
    h(
      "p",
      {},
      `The audit ${found.method} with ${found.canaries} canaries found ε ${found.estimate ? "≈" : "≥"} ${number(found.epsilon_lower)}; claimed was ${found.claimed === null ? "nothing" : epsilon(found.claimed)}. An audit proves leaks, never their absence.`,
    ),
  );
}

/** The datasets' accounts of this folder: what each run drew from what was granted once. */
async function over() {
  const found = await ask("accounts").catch(() => []);
  return h(
    "div",
    {},
    found.map((one) =>
      one.problem
        ? h("p", { class: "error" }, one.problem)
        : h(
            "div",
            { class: "promise" },
            h("h3", {}, `Account ${one.name}`),
            h("p", {}, one.sentence),
            one.draws.length
              ? table(
                  ["run", "date", "records", "ε granted", "share of the grant"],
                  one.draws.map((d) => [
                    d.run,
                    d.date,
                    d.records.toLocaleString("en"),
                    epsilon(d.budget),
                    [share(d.share), ` ${percent(d.share)}`],
                  ]),
                )
              : h("p", { class: "quiet" }, "No run has drawn on it yet."),
            h(
              "p",
              { class: "note-line" },
              `If one record took part in all of them, ${percent(
                Math.min(
                  1,
                  one.draws.reduce((sum, d) => sum + d.share, 0),
                ),
              )} of its grant is used. What holds over all runs is the grant itself, ε = ${epsilon(one.epsilon === "inf" ? null : one.epsilon)}: a share that is used up is no ε.`,
            ),
          ),
    ),
  );
}

function share(value) {
  const inner = h("i"),
    bar = h("span", { class: "share" }, inner);
  inner.style.width = `${Math.min(100, 100 * value)}%`;
  return bar;
}

/** Files are taken by their names certificate.json and ledger.sqlite; nothing else is read or sent. */
function dropZone(body) {
  const take = (files) => {
    const of = (name) => files.find((file) => file.name === name),
      certificate = of("certificate.json") ?? files.find((file) => file.name.endsWith(".json")),
      ledger = of("ledger.sqlite") ?? files.find((file) => file.name.endsWith(".sqlite"));
    if (!certificate && !ledger) {
      put(
        body,
        h(
          "p",
          { class: "error", role: "alert" },
          "Neither a certificate.json nor a ledger.sqlite is among these files.",
        ),
      );
      return;
    }
    const parts = [certificate, ledger].filter(Boolean);
    history.replaceState(null, "", "#audit");
    examine(body, () =>
      ask(`audit?certificate=${certificate?.size ?? 0}&ledger=${ledger?.size ?? 0}`, {
        method: "POST",
        body: new Blob(parts),
      }),
    );
  };
  const input = (attributes) =>
    h("input", {
      type: "file",
      hidden: true,
      ...attributes,
      onchange: (event) => take([...event.target.files]),
    });
  const folder = input({ webkitdirectory: true }),
    files = input({ multiple: true, accept: ".json,.sqlite", id: "files" });
  const zone = h(
    "div",
    {
      class: "drop",
      ondragover: (event) => {
        event.preventDefault();
        zone.classList.add("over");
      },
      ondragleave: () => zone.classList.remove("over"),
      ondrop: async (event) => {
        event.preventDefault();
        zone.classList.remove("over");
        take(await dropped(event.dataTransfer));
      },
    },
    "Drop a run folder or a certificate here",
    h("br"),
    h("button", { class: "button", type: "button", onclick: () => folder.click() }, "Choose a folder"),
    h("button", { class: "button", type: "button", onclick: () => files.click() }, "Choose files"),
    folder,
    files,
  );
  return zone;
}

/** Files of a drop, and those directly inside dropped folders. */
async function dropped(transfer) {
  const entries = [...transfer.items].map((item) => item.webkitGetAsEntry?.()).filter(Boolean);
  if (!entries.length) return [...transfer.files];
  const file = (entry) => new Promise((done, fail) => entry.file(done, fail));
  const listed = (folder) => new Promise((done, fail) => folder.createReader().readEntries(done, fail));
  const found = [];
  for (const entry of entries)
    for (const one of entry.isDirectory ? await listed(entry) : [entry])
      if (one.isFile && /\.(json|sqlite)$/.test(one.name)) found.push(await file(one));
  return found;
}
