// A search among settings: the winner, the list, and what winner and search cost together.

import { epsilon, h, number, table } from "./dom.js";

/** The part of a page that only a search has; a file that is none is one line. */
export function choicePart(choice) {
  try {
    return h("section", { "aria-label": "A choice of settings" }, parts(choice));
  } catch {
    return h("p", { class: "error" }, "selection.json cannot be read: take an intact folder");
  }
}

function parts(choice) {
  const { winner, score, settings, stopping } = choice,
    names = Object.keys(settings[0]),
    won = JSON.stringify(winner),
    each = Object.entries(choice.epsilon);
  return [
    h("h2", {}, "What was chosen"),
    winner
      ? h("p", {}, names.map((name) => `${name} = ${winner[name]}`).join(", "))
      : h("p", {}, "Nothing: no trial was made."),
    score ? h("p", { class: "note-line" }, `Its released score: ${number(score.value)} ± ${number(2 * score.noise)}`) : null,
    h("p", {}, choice.meaning),
    stopping
      ? h("p", { class: "note-line" }, `The number of trials: ${lawOf(stopping)}, ${number(stopping.mean)} in the mean. How many there were is secret.`)
      : null,
    h("h2", {}, "The list"),
    table(
      [...names, ""],
      settings.map((one) => [...names.map((name) => String(one[name])), JSON.stringify(one) === won ? "chosen" : ""]),
    ),
    h("h2", {}, "What winner and search cost"),
    table(
      ["client", "ε"],
      each.map(([name, value]) => [name, epsilon(value)]),
    ),
    h("p", { class: "note-line" }, "modicum verify FOLDER computes it anew, with another library beside."),
  ];
}

const LAWS = new Map([[0, "logarithmic"], [1, "geometric"], [null, "Poisson"]]);
const lawOf = ({ shape }) => LAWS.get(shape) ?? `negative binomial of shape ${number(shape)}`;
