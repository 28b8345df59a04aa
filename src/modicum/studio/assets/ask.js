// Questions to the studio's server, which all lie under the page's own secret address.

/** The answer as JSON; a refusal becomes an Error with the server's one line. */
export async function ask(path, options) {
  const answer = await fetch(`api/${path}`, options);
  const value = await answer.json().catch(() => ({ error: `the studio answered ${answer.status}` }));
  if (!answer.ok) throw new Error(value.error ?? `the studio answered ${answer.status}`);
  return value;
}

export const post = (path, value) =>
  ask(path, { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(value) });

/** Lines of JSON as they come; `abort` is an AbortSignal. */
export async function* lines(path, value, signal) {
  const answer = await fetch(`api/${path}`, { method: "POST", body: JSON.stringify(value), signal });
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value: text, done } = await reader.read();
    rest += text ?? "";
    const whole = rest.split("\n");
    rest = whole.pop();
    for (const line of whole) if (line) yield JSON.parse(line);
    if (done) return;
  }
}
