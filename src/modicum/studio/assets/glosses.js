// Every word of the trade in plain words, and the button that opens them.

import { h } from "./dom.js";

export const GLOSSES = {
  ε: "How much anyone can learn about one protected unit: with it or without it, no outcome becomes more than e^ε times as likely. Smaller is stricter; 0 tells nothing, ∞ promises nothing.",
  δ: "The small probability with which the promise about ε may fail. Kept far below one over the number of records.",
  unit: "What is hidden: one record of a client, or a whole client with everything it holds.",
  adjacency:
    "In what two worlds that must look alike differ: the unit's contribution is blanked out (zero-out), it is there or not (add-remove), or it is replaced by another (replace-one).",
  view: "Who looks on, and what they see: every message, only the sum of a round, or only the published models.",
  budget: "The ε that a client grants for the whole run. What is certified never exceeds it.",
  "certified ε":
    "What holds for a client whatever happened in the run: the ε of its whole plan, or the cap of its filter. Never an estimate of what was spent so far.",
  guard:
    "What keeps a client inside its budget: a plan fixed beforehand, a filter that stops at a cap, or nothing.",
  accountant: "The computation that turns noise, sampling and number of releases into ε.",
  release: "One noisy value that leaves a client. Each is written to the ledger before it is computed.",
  sampling: "Each step uses a random part of the records that nobody sees; that hides more.",
  "clipping bound": "The most that one unit may move what is released; noise is measured against it.",
  "noise multiplier": "Standard deviation of the noise over the clipping bound. More noise, smaller ε.",
  ledger: "A chained journal of every plan and every release. Changing or removing an entry breaks the chain.",
  head: "Hash of the ledger's last entry. Kept elsewhere, it shows later whether the ledger was rolled back.",
  simulation:
    "Noise came from a seed that can be repeated, so the run protected nobody: its ε is that of the same run deployed.",
  account:
    "What all runs on the same records may cost together. A silo states it once, and each run draws its full price.",
  "second opinion": "The same ε by a library that shares no code with ours.",
};

/** A word that explains itself when it is pressed. */
export function term(word, shown = word) {
  const gloss = h("span", { class: "gloss", role: "note", hidden: true }, GLOSSES[word]);
  const button = h(
    "button",
    {
      class: "term",
      type: "button",
      "aria-expanded": "false",
      onclick: () => {
        gloss.hidden = !gloss.hidden;
        button.setAttribute("aria-expanded", String(!gloss.hidden));
      },
    },
    shown,
  );
  return [button, gloss];
}

/** All of them, for the foot of a page. */
export function glossary(words = Object.keys(GLOSSES)) {
  return h(
    "div",
    { class: "glossary" },
    words.map((word) => h("div", {}, h("b", {}, word), ` — ${GLOSSES[word]}`)),
  );
}
