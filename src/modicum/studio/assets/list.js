// The list of runs, to choose one or several of; shared by watch, compare and audit.

import { h, number, percent, put } from "./dom.js";

const folderOf = (row) => (row.name.includes("/") ? row.name.slice(0, row.name.lastIndexOf("/")) : "");
export const baseOf = (row) => row.name.slice(row.name.lastIndexOf("/") + 1) || row.name;

/**
 * Draws `rows` into a list with a search box. With `toggle` rows have boxes to tick, else they are links to
 * `link(row)`. Returns { element, update(rows), choose(ids) }.
 */
export function runList({ rows, chosen, link, toggle }) {
  let all = rows,
    marked = new Set(chosen);
  const list = h("ul", { class: "list" }),
    told = h("p", { class: "note-line", role: "status" });
  const search = h("input", {
    type: "search",
    placeholder: "Find a run",
    "aria-label": "Find a run by name, method, dataset or state",
    oninput: draw,
  });
  const matches = () => {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    return all.filter((row) =>
      words.every((w) => `${row.name} ${row.method} ${row.dataset} ${row.state}`.toLowerCase().includes(w)),
    );
  };
  function draw() {
    const found = matches(),
      byFolder = new Map();
    for (const row of found) byFolder.set(folderOf(row), [...(byFolder.get(folderOf(row)) ?? []), row]);
    told.textContent =
      found.length === all.length
        ? `${all.length} run${all.length === 1 ? "" : "s"}`
        : `${found.length} of ${all.length} runs`;
    put(
      list,
      ...[...byFolder].flatMap(([folder, inside]) =>
        [
          folder || toggle
            ? h(
                "li",
                { class: "folder" },
                folder || "in the folder itself",
                toggle && inside.length > 1
                  ? h(
                      "button",
                      { type: "button", onclick: () => all_of(inside) },
                      inside.every((r) => marked.has(r.id)) ? "none" : "all",
                    )
                  : null,
              )
            : null,
          ...inside.map(line),
        ].filter(Boolean),
      ),
    );
  }
  function all_of(inside) {
    const on = !inside.every((row) => marked.has(row.id));
    inside.forEach((row) => (on ? marked.add(row.id) : marked.delete(row.id)));
    draw();
    toggle([...marked]);
  }
  function line(row) {
    const what = h(
      "span",
      { class: "what" },
      h("b", {}, baseOf(row)),
      h("small", {}, [row.method, row.dataset].filter(Boolean).join(" · ") || "nothing is known yet"),
    );
    const now = h(
      "span",
      { class: "now" },
      row.accuracy !== null ? percent(row.accuracy) : row.certified ? `ε ${number(row.epsilon, "∞")}` : "",
      h("br"),
      h(
        "span",
        { class: `state ${row.state}` },
        row.state === "finished" && row.seed !== null ? `seed ${row.seed}` : row.state,
      ),
    );
    if (!toggle)
      return h(
        "li",
        {},
        h(
          "a",
          { class: "row", href: link(row), "aria-current": String(marked.has(row.id)) },
          h("span", { class: "dot-of", colour: row.colour }),
          what,
          now,
        ),
      );
    const box = h("input", {
      type: "checkbox",
      onchange: () => {
        box.checked ? marked.add(row.id) : marked.delete(row.id);
        toggle([...marked]);
      },
    });
    box.checked = marked.has(row.id);
    return h("li", {}, h("label", { class: "row" }, box, what, now));
  }
  draw();
  return {
    element: h("div", {}, search, told, list),
    update(next) {
      all = next;
      draw();
    },
    choose(ids) {
      marked = new Set(ids);
      draw();
    },
  };
}
