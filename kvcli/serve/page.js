// The page of `kvcli serve`: a chat over /v1/chat/completions. Words of a model or a document become text nodes only.

const $ = (id) => document.getElementById(id);
const settings = $("settings"), question = $("question"), log = $("log");
const LARGEST = 12 * 2 ** 20; // bytes of a file: base64 adds a third, and a request has at most 16 MiB
const SIGNS = { page: "p.", heading: "§", chapter: "§", line: "l." };
const CITATION = /\[([^[\]\n]{0,200}?)(\bpp?\.|§|\bll?\.)\s*([^[\]\n]{1,200})\]/g;
const documents = new Map(); // id -> { id, name, unit, tokens, data, sections }
let turns = [], attached = [], running = null;

const count = (x, digits = 0) => x.toLocaleString("en", { maximumFractionDigits: digits });
const told = (error) => [`error: ${error.message}`, ...(error.try ?? []).map((one) => `  try: ${one}`)].join("\n");
const say = (text) => { $("alert").textContent = text; }, tell = (text) => { $("status").textContent = text; };

function tag(name, properties = {}, ...children) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
}

// --- requests
async function call(path, body, signal) {
  const key = sessionStorage.getItem("key"), lost = { message: "the server does not answer", try: ["kvcli serve, if it has ended"] };
  const headers = { ...(body && { "Content-Type": "application/json" }), ...(key && { Authorization: `Bearer ${key}` }) };
  const asked = { method: body ? "POST" : "GET", headers, body: body && JSON.stringify(body), signal, cache: "no-store" };
  const response = await fetch(path, asked).catch((error) => { throw error.name === "AbortError" ? error : lost; });
  if (response.ok) return response;
  if (response.status !== 401) throw (await response.json().catch(() => ({}))).error ?? { message: `the server answers with status ${response.status}` };
  $("locked").showModal();
  await new Promise((given) => $("locked").addEventListener("close", given, { once: true }));
  return call(path, body, signal);
}

async function* lines(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let held = "", read; !(read = await reader.read()).done;) {
    const parts = (held + read.value).split("\n");
    held = parts.pop();
    yield* parts;
  }
}

function messagesUntil(last) {
  const system = settings.elements.system.value.trim(), found = system ? [{ role: "system", content: system }] : [];
  for (const turn of turns.slice(0, turns.indexOf(last) + 1)) {
    const files = turn.documents.map((id) => ({ type: "file", file: { file_id: id } })), { text, calls } = turn.answers[0];
    if (turn.results) found.push(...turn.results.map((one) => ({ role: "tool", tool_call_id: one.id, content: one.text })));
    else found.push({ role: "user", content: [...files, { type: "text", text: turn.question }] });
    if (turn !== last) found.push({ role: "assistant", content: text, ...(calls.length && { tool_calls: calls }) });
  }
  return found;
}

function options() {
  const found = { stream: true, stream_options: { include_usage: true }, timings_per_token: true }, tools = settings.elements.tools.value.trim();
  if (!settings.reportValidity()) throw { message: "a setting is out of its range" };
  for (const { name, value, valueAsNumber } of settings.querySelectorAll("input")) if (value !== "") found[name] = valueAsNumber;
  try {
    return tools ? { ...found, tools: JSON.parse(tools) } : found;
  } catch (error) { throw { message: `the tools are no JSON: ${error.message}` }; }
}

// --- an answer
async function write(turn, answer, options, signal) {
  let isWhole = false, isDue = false;
  draw(turn, answer, true);
  try {
    for await (const line of lines(await call("/v1/chat/completions", { ...options, model: answer.model, messages: messagesUntil(turn) }, signal))) {
      if (line === "data: [DONE]") isWhole = true;
      else if (line.startsWith("data: ")) take(answer, JSON.parse(line.slice(6)));
      else if (line.startsWith(": ")) answer.progress = line.slice(2);
      isDue ||= requestAnimationFrame(() => { isDue = false; draw(turn, answer, !isWhole); });
    }
    if (!isWhole) throw { message: "the connection was lost before the end of the answer" };
  } catch (error) {
    Object.assign(answer, error.name === "AbortError" ? { finish: "stopped" } : { error });
  }
  isWhole = true;
  draw(turn, answer, false);
}

function take(answer, chunk) {
  if (chunk.error) throw chunk.error;
  const { delta = {}, finish_reason } = chunk.choices?.[0] ?? {};
  answer.text += delta.content ?? "";
  answer.thinking += delta.reasoning_content ?? "";
  for (const { index = answer.calls.length, id, function: { name = "", arguments: said = "" } } of delta.tool_calls ?? []) {
    const made = (answer.calls[index] ??= { id, type: "function", function: { name: "", arguments: "" } }).function;
    [made.name, made.arguments] = [made.name + name, made.arguments + said];
  }
  for (const [key, value] of Object.entries({ finish: finish_reason, timings: chunk.timings, usage: chunk.usage, notes: chunk.notes })) if (value) answer[key] = value;
}

function figures({ timings: t, usage: u, finish, progress, notes = [] }, isWriting) {
  const said = [];
  if (t?.predicted_per_second) said.push(`${count(t.predicted_per_second, 1)} tok/s`);
  if (t?.draft_n) said.push(`${count((100 * t.draft_n_accepted) / t.draft_n)} % of ${count(t.draft_n)} draft tokens accepted`);
  if (t) said.push(`${count(u?.completion_tokens ?? t.predicted_n)} tokens`, `${count(t.cache_n)} of ${count(t.cache_n + t.prompt_n)} prompt tokens cached`);
  if (t?.kv_bytes) said.push(`KV cache ${count(t.kv_bytes / 2 ** 20, 1)} MiB`);
  if (isWriting && !t?.predicted_n) return progress ?? "waiting for the first word";
  return [...said, ...({ length: ["ended at the limit of tokens"], stopped: ["stopped"] }[finish] ?? []), ...notes].join(" · ");
}

function draw(turn, answer, isWriting) {
  const { view } = answer, isAtEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 60;
  view.article.ariaBusy = String(isWriting);
  view.thought.hidden = !answer.thinking;
  view.thought.lastChild.textContent = answer.thinking;
  view.text.replaceChildren(...answer.text.split(/^```[^\n]*(?:\n|$)/m).flatMap((part, i) => (i % 2 ? [tag("pre", {}, tag("code", {}, part))] : cited(part, turn))));
  view.calls.replaceChildren(...answer.calls.map((one) => tag("pre", { className: "call" }, `calls ${one.function.name}(${one.function.arguments})`)));
  view.figures.textContent = figures(answer, isWriting);
  view.fault.textContent = answer.error ? told(answer.error) : "";
  if (turn.answers[1]) compare(turn);
  if (isAtEnd) log.scrollTop = log.scrollHeight;
}

function compare(turn) { // marks the text that both answers begin with
  const views = turn.answers.map((one) => one.view), [a, b] = views.map((view) => view.text.textContent);
  let n = 0;
  while (n < a.length && a[n] === b[n]) n += 1;
  turn.view.ranges = views.map(({ text }) => beginning(text, n));
  if (globalThis.Highlight) CSS.highlights.set("equal", new Highlight(...turns.flatMap((one) => one.view?.ranges ?? [])));
  const isOpen = turn.answers.some((one) => one.error || one.view.article.ariaBusy === "true");
  const said = a === b ? "Both answers have the same text." : `The answers are equal up to character ${count(n)} of ${count(a.length)} and ${count(b.length)}.`;
  turn.view.equal.textContent = isOpen ? "" : said;
}

function beginning(root, n) { // the range of the first n characters
  const walker = document.createTreeWalker(root, NodeFilter.SHOW_TEXT), found = new Range();
  found.setStart(root, 0);
  for (let node; n > 0 && (node = walker.nextNode()); n -= node.length) found.setEnd(node, Math.min(n, node.length));
  return found;
}

// --- citations and pages
function cited(text, turn) { // the text, with buttons in place of its citations
  const known = turns.slice(0, turns.indexOf(turn) + 1).flatMap((one) => one.documents).map((id) => documents.get(id)).reverse();
  let found = [], at = 0;
  for (const { 0: whole, 1: before, 2: sign, 3: labels, index } of text.matchAll(CITATION)) {
    const name = before.trim().toLowerCase();
    const hit = known.find((one) => SIGNS[one.unit] === sign.replace(/^(.)\1\./, "$1.") && one.name.toLowerCase().startsWith(name));
    if (!hit) continue;
    const label = labels.match(sign === "§" ? /[^;?]+/ : /\d+/)?.[0] ?? labels, claim = sentences(text.slice(0, index).trimEnd()).at(-1)?.[0];
    const onclick = ({ currentTarget }) => openPage(hit, label, claim, currentTarget);
    found.push(text.slice(at, index), tag("button", { type: "button", className: "cite", title: `Open ${hit.name}`, onclick }, whole));
    at = index + whole.length;
  }
  return [...found, text.slice(at)];
}

async function openPage(one, label, claim, from) {
  try {
    one.sections ??= (await (await call(`/kvcli/pages/${one.id}`)).json()).sections;
  } catch (error) { return say(told(error)); }
  const plain = (said) => said.toLowerCase().replace(/[^\p{L}\p{N}]/gu, "");
  const isInside = ([first, last = first]) => first <= Number(label) && Number(label) <= last;
  const i = one.sections.findIndex((s) => plain(s.label) === plain(label) || (one.unit === "line" && isInside(s.label.split("-").map(Number))));
  if (i < 0) return say(`${one.name} has no ${SIGNS[one.unit]} ${label.trim()}`);
  $("close").onclick = () => { $("pages").hidden = true; (from.isConnected ? from : question).focus(); };
  showSection(one, i, claim);
  $("place").focus();
}

function showSection(one, i, claim = "") {
  const { label, text } = one.sections[i], [said, start] = closest(text, claim), found = tag("mark", {}, said);
  $("place").textContent = `${one.name}, ${SIGNS[one.unit]} ${label}`;
  $("section").replaceChildren(text.slice(0, start), ...(said ? [found] : []), text.slice(start + said.length));
  $("pages").hidden = false;
  for (const [button, to] of [[$("back"), i - 1], [$("on"), i + 1]])
    Object.assign(button, { disabled: !one.sections[to], onclick: () => showSection(one, to) });
  $("section").scrollTop = 0;
  if (said) found.scrollIntoView({ block: "center" });
}

function sentences(text) { // [sentence, its place]; "p. 3" does not end one
  const found = [];
  for (const { segment, index } of new Intl.Segmenter(undefined, { granularity: "sentence" }).segment(text))
    if (/^[\d\p{Ll}]/u.test(segment) && /\b\p{L}{1,3}\.\s*$/u.test(found.at(-1)?.[0] ?? "")) found.at(-1)[0] += segment;
    else found.push([segment, index]);
  return found.map(([said, at]) => [said.trimEnd(), at]);
}

function closest(text, claim) { // the sentence that shares most words with the claim; rare words count more
  const wordsOf = (said) => new Set(said.toLowerCase().match(/[\p{L}\p{N}]{2,}/gu));
  const all = sentences(text).map(([said, at]) => [said, at, wordsOf(said)]), wanted = [...wordsOf(claim)];
  const weights = new Map(wanted.map((word) => [word, 1 / all.filter((one) => one[2].has(word)).length]));
  const scores = all.map((one) => wanted.reduce((sum, word) => sum + (one[2].has(word) ? weights.get(word) : 0), 0));
  const best = Math.max(...scores);
  return best < 0.5 || !all.length ? ["", 0] : all[scores.indexOf(best)];
}

// --- turns
function show(turn) {
  const keep = (one, view) => Object.defineProperty(one, "view", { value: view, configurable: true }).view; // not saved
  const made = turn.answers.map((answer) => {
    const view = keep(answer, { text: tag("div", { className: "text" }), calls: tag("div"), figures: tag("p", { className: "figures" }), fault: tag("p", { className: "fault" }) });
    view.thought = tag("details", { className: "thought" }, tag("summary", {}, "Thinking"), tag("div", { className: "text" }));
    return (view.article = tag("article", {}, tag("h2", {}, answer.model), view.thought, view.text, view.calls, view.figures, view.fault));
  });
  const names = tag("ul", {}, ...turn.documents.map((id) => tag("li", {}, documents.get(id).name)));
  const view = keep(turn, { equal: tag("p", { className: "equal" }), below: tag("div", { className: "row" }) });
  const asked = tag("div", { className: "question" }, ...(turn.documents.length ? [names] : []), turn.question);
  view.section = tag("section", { className: made[1] ? "two" : "" }, asked, tag("div", { className: "answers" }, ...made), view.equal, view.below);
  log.append(view.section);
  turn.answers.forEach((answer) => draw(turn, answer, false));
  log.scrollTop = log.scrollHeight;
}

async function ask(text, { documents: files = [], results } = {}) {
  if (running) return;
  say("");
  let asked, control = new AbortController();
  try {
    asked = options();
  } catch (error) { return say(told(error)); }
  const { model, beside } = settings.elements, names = [model.value, beside.value].filter(Boolean);
  const turn = { question: text, documents: files, results, answers: names.map((name) => ({ model: name, text: "", thinking: "", calls: [] })) };
  turns.at(-1)?.view.below.replaceChildren();
  turns.push(turn);
  show(turn);
  setRunning(control);
  tell("The answer is being written.");
  await Promise.all(turn.answers.map((answer) => write(turn, answer, asked, control.signal)));
  setRunning(null);
  if (!turns.includes(turn)) return; // a new chat began
  const [{ error, finish: why, text: said, thinking, calls }] = turn.answers;
  if (said || thinking || calls.length || !(error || why === "stopped")) {
    finish(turn);
    tell(error ? "The answer ended with an error." : "The answer is complete.");
  } else { // as if it were not asked
    const isSent = error?.code === "no_such_document" && await sendAgain();
    remove(turn, !isSent);
    tell("");
    if (isSent) return ask(text, { documents: files, results });
    if (error) say(told(error));
  }
  save();
}

function remove(turn, isReturned) { // returned: its question stands in the field again
  turns = turns.filter((one) => one !== turn);
  turn.view.section.remove();
  if (isReturned && !turn.results && !question.value) [question.value, attached] = [turn.question, [...new Set([...turn.documents, ...attached])]];
  drawAttached();
  turns.slice(-1).forEach(finish);
}

function finish(turn) { // buttons below the last turn, and fields for the results of its calls
  const button = (said, onclick) => tag("button", { type: "button", onclick }, said), { calls } = turn.answers[0];
  const retry = button("Ask again", () => { remove(turn, false); ask(turn.question, turn); });
  const edit = button("Edit", () => { question.value = ""; remove(turn, true); save(); question.focus(); });
  const fields = calls.map(({ function: { name } }) => tag("textarea", { rows: 2, ariaLabel: `Result of ${name}`, placeholder: `Result of ${name}` }));
  const results = () => calls.map(({ id }, i) => ({ id, text: fields[i].value }));
  const give = button("Give results", () => ask(fields.map((one) => one.value).join("\n"), { results: results() }));
  turn.view.below.replaceChildren(retry, ...(turn.results ? [] : [edit]), ...(calls.length ? [...fields, give] : []));
}

function setRunning(control) { [running, $("stop").hidden, $("send").hidden] = [control, !control, Boolean(control)]; }

// --- documents
async function attach(files) {
  say("");
  for (const { name, size, ...file } of [...files].map((one) => ({ name: one.name, size: one.size, one }))) {
    tell(`${name} is being read`);
    try {
      if (size > LARGEST) throw { message: `${name} has ${count(size / 2 ** 20, 1)} MiB; the limit is ${count(LARGEST / 2 ** 20)} MiB` };
      const data = await new Promise((onload, onerror) => Object.assign(new FileReader(), { onload, onerror }).readAsDataURL(file.one));
      const { id, notes, ...facts } = await send(name, data.target.result);
      documents.set(id, { id, ...facts, data: data.target.result });
      attached = [...new Set([...attached, id])];
      tell([`${name}: ${count(facts.tokens)} tokens`, ...notes].join("; "));
    } catch (error) {
      tell("");
      say(told(error.message ? error : { message: `${name} cannot be read` }));
    }
  }
  drawAttached();
  save();
}

const send = async (filename, file_data) => (await call("/kvcli/pages", { type: "input_file", filename, file_data })).json();

async function sendAgain() { // the server keeps a bounded number of documents in memory
  if ([...documents.values()].some((one) => !one.data)) return false; // dropped before the page was loaded again
  for (const one of documents.values()) await send(one.name, one.data);
  return true;
}

function drawAttached() {
  $("attached").replaceChildren(...attached.map((id) => {
    const { name, tokens } = documents.get(id), onclick = () => { attached = attached.filter((one) => one !== id); drawAttached(); question.focus(); };
    return tag("li", {}, `${name}, ${count(tokens)} tokens`, tag("button", { type: "button", ariaLabel: `Remove ${name}`, onclick }, "×"));
  }));
}

// --- memory of the tab, and export
function save() {
  const form = Object.fromEntries([...settings.elements].filter((one) => one.name).map((one) => [one.name, one.value]));
  const facts = [...documents.values()].map(({ data, sections, ...one }) => one);
  try {
    sessionStorage.setItem("chat", JSON.stringify({ turns, attached, documents: facts, form }));
  } catch { tell("The chat is too long to survive a reload of this page; Export keeps it."); }
}

function restore() {
  const saved = JSON.parse(sessionStorage.getItem("chat") ?? "null");
  for (const one of saved?.documents ?? []) documents.set(one.id, one);
  for (const [name, value] of Object.entries(saved?.form ?? {})) if (settings.elements[name]) settings.elements[name].value = value;
  [turns, attached] = [saved?.turns ?? [], saved?.attached ?? []];
  turns.forEach(show);
  turns.slice(-1).forEach(finish);
  drawAttached();
}

function markdown() {
  const system = settings.elements.system.value.trim(), parts = ["# Chat", system && `*System: ${system}*`];
  for (const turn of turns) {
    parts.push(turn.results ? "## Results of tools" : "## Question", ...turn.documents.map((id) => `Document: ${documents.get(id).name}`), turn.question);
    for (const one of turn.answers) {
      parts.push(`## ${one.model}`, one.thinking && one.thinking.replace(/^/gm, "> "), one.text);
      parts.push(...one.calls.map(({ function: { name, arguments: said } }) => `    ${name}(${said})`), `(${figures(one, false)})`);
    }
  }
  return parts.filter((part) => part.trim()).join("\n\n") + "\n";
}

// --- events
const on = (id, type, act) => $(id).addEventListener(type, (event) => { if (type === "submit") event.preventDefault(); act(event); });
on("settings", "submit", () => {});
on("settings", "change", save);
on("stop", "click", () => running?.abort());
on("files", "change", async ({ target }) => { await attach(target.files); target.value = ""; });
on("compose", "submit", () => {
  const text = question.value.trim(), files = attached;
  if (!text || running) return;
  [question.value, attached] = ["", []];
  drawAttached();
  ask(text, { documents: files });
});
on("question", "keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  $("compose").requestSubmit(); // as the button does
});
on("question", "paste", ({ clipboardData: { files } }) => { if (files.length) attach(files); });
on("export", "click", () => {
  const href = URL.createObjectURL(new Blob([markdown()], { type: "text/markdown" }));
  tag("a", { href, download: "chat.md" }).click();
  setTimeout(() => URL.revokeObjectURL(href), 1000);
});
on("fresh", "click", () => {
  running?.abort();
  [turns, attached, $("pages").hidden] = [[], [], true];
  documents.clear();
  log.replaceChildren();
  drawAttached();
  save();
  question.focus();
});
on("unlock", "submit", () => { sessionStorage.setItem("key", $("key").value); $("unlock").reset(); $("locked").close(); });
for (const type of ["dragover", "dragleave", "drop"]) addEventListener(type, (event) => {
  event.preventDefault();
  $("compose").classList.toggle("over", type === "dragover");
  if (type === "drop" && event.dataTransfer.files.length) attach(event.dataTransfer.files);
});
addEventListener("keydown", ({ key }) => {
  if (key !== "Escape" || $("locked").open) return;
  if (running) running.abort();
  else if (!$("pages").hidden) $("close").click();
});

settings.querySelector("details").open = innerWidth > 900;
try {
  const { data: [usual, ...all] } = await (await call("/v1/models")).json(), { model, beside } = settings.elements;
  for (const { id, meta } of all) for (const list of [model, beside]) list.append(tag("option", { value: id }, `${meta.profile}, ${meta.exactness}`));
  model.value = `${usual.id}:${usual.meta.profile}`;
  $("served").textContent = `${usual.id} · ${count(usual.max_model_len)} tokens`;
} catch (error) {
  say(told(error));
}
restore();
question.focus();
