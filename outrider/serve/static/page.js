// The page speaks to the server's own interface, as any other client does. What a model writes
// becomes text nodes and nothing else.

const $ = (id) => document.getElementById(id);
const NARROW = matchMedia("(max-width: 52rem)");
const WHO = {
  correction: "correction: the target's token in place of the rejected one",
  forced: "forced: the grammar left no choice, so nothing was run to draft it",
  bonus: "bonus: the target's token after a fully accepted draft",
  plain: "the target's token; nothing was drafted",
};

const server = { model: "", gamma: 1, governed: false, methods: new Map(), standard: "", chats: false };
let messages = [];
let running = null; // the AbortController of what runs
let shown = null; // the output whose figures and rounds are shown

// ------------------------------------------------------------------ the server's interface

function headers() {
  const key = sessionStorage.getItem("outrider-key");
  return key ? { Authorization: `Bearer ${key}` } : {};
}

async function call(path, body, signal) {
  const sent = body && {
    method: "POST",
    body: JSON.stringify(body),
    headers: { ...headers(), "Content-Type": "application/json" },
    signal,
  };
  const response = await fetch(path, sent || { headers: headers() });
  if (response.ok) return response;
  const told = await response.json().catch(() => null);
  if (response.status === 401) {
    askForKey();
    throw new Error("This server wants an API key: enter it in the settings.");
  }
  throw new Error(told?.error?.message || `the server answered with status ${response.status}`);
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: ") || line === "data: [DONE]") continue;
      const event = JSON.parse(line.slice(6));
      if (event.error) throw new Error(event.error.message);
      yield event;
    }
  }
}

async function connect() {
  const documents = ["v1/models", "methods"].map(async (path) => (await call(path)).json());
  const [models, methods] = await Promise.all(documents);
  const info = await call("tokenizer_info").then((answer) => answer.json(), () => ({}));
  server.model = models.data[0].id;
  server.chats = Boolean(info.chat_template);
  server.gamma = methods.num_speculative_tokens;
  server.governed = methods.governed;
  server.standard = methods.default;
  server.methods = new Map(methods.data.map((each) => [each.id, each]));
  fillSettings();
  $("model").textContent = `${server.model} · ${server.chats ? "chat" : "text completion"}`;
  $("prompt-label").textContent = server.chats ? "Message" : "Text to continue";
  $("send").disabled = false;
  fail(null);
}

// ------------------------------------------------------------------------------- settings

function fillSettings() {
  const options = [...server.methods.values()].map((each) => {
    const option = document.createElement("option");
    const marks = [
      each.id === server.standard && "the server's",
      !each.lossless && "lossy",
      each.greedy_only && "temperature 0 only",
    ].filter(Boolean);
    option.value = each.id;
    option.textContent = marks.length ? `${each.id} (${marks.join(", ")})` : each.id;
    return option;
  });
  $("method").replaceChildren(...options);
  $("method").value = server.standard;
  $("gamma").max = server.gamma;
  $("gamma").value = server.gamma;
  showSettings();
}

function showSettings() {
  const method = server.methods.get($("method").value);
  $("summary").textContent = method ? method.summary : "";
  $("budget").disabled = !method?.has_budget;
  $("gamma").disabled = !method || method.id === "plain";
  for (const output of document.querySelectorAll(".field output")) {
    output.value = $(output.htmlFor.value).value;
  }
  const drafts = !$("gamma").disabled && Number($("gamma").value) > 0;
  if (server.governed && drafts) {
    document.querySelector("output[for=gamma]").value = `up to ${$("gamma").value}, as measured`;
  }
}

/** The fields of a request that the settings say. */
function chosen() {
  const method = $("method").value;
  const seed = $("seed").value;
  const fields = {
    model: server.model,
    temperature: Number($("temperature").value),
    max_tokens: Math.max(1, Math.floor(Number($("length").value)) || 1),
  };
  if (seed !== "") fields.seed = Number(seed);  // with one, the server drafts a fixed length
  if (method !== server.standard) fields.method = method;
  if (!$("budget").disabled) fields.divergence_budget = Number($("budget").value);
  const gamma = Number($("gamma").value);
  if (!$("gamma").disabled && gamma < server.gamma) fields.num_speculative_tokens = gamma;
  return fields;
}

/** The same fields for plain decoding. */
function withoutSpeculation({ method, divergence_budget, num_speculative_tokens, ...fields }) {
  const off = server.methods.has("plain") ? { method: "plain" } : { num_speculative_tokens: 0 };
  return { ...fields, ...off };
}

// ------------------------------------------------------------------------------ generation

/** An output as far as it came. `text` is all of it, `seconds` counts from the first round on. */
function newOutput(fields) {
  return {
    fields, text: "", rounds: [], numTokens: 0, drafted: 0, accepted: 0,
    first: null, later: 0, seconds: 0, element: null, selected: null,
  };
}

async function generate(output, signal, onPart) {
  const path = output.fields.messages ? "v1/chat/completions" : "v1/completions";
  const response = await call(path, {
    ...output.fields, stream: true, return_pieces: true, return_rounds: true, return_token_ids: true,
  }, signal);
  for await (const event of events(response)) {
    const choice = event.choices[0];
    if (!choice?.token_ids) continue;
    const now = performance.now();
    if (output.first === null) output.first = now;
    else output.later += choice.token_ids.length;
    output.seconds = (now - output.first) / 1000;
    output.numTokens += choice.token_ids.length;
    for (const round of choice.rounds) {
      output.rounds.push(round);
      output.drafted += round.drafted.length;
      output.accepted += round.drafted.filter((token) => token.outcome === "accepted").length;
    }
    output.text += choice.pieces.map((piece) => piece.text).join("");
    onPart(choice.pieces);
  }
}

const speed = (output) => (output.later && output.seconds ? output.later / output.seconds : null);

/** Runs something that Escape stops; whether it was `done`, `stopped` or `failed`. */
async function run(work) {
  running = new AbortController();
  setRunning(true);
  fail(null);
  try {
    await work(running.signal);
    return "done";
  } catch (error) {
    if (error.name !== "AbortError") {
      fail(error.message);
      return "failed";
    }
    say("Stopped.");
    return "stopped";
  } finally {
    running = null;
    setRunning(false);
  }
}

async function send() {
  const prompt = $("prompt").value;
  if (running || !server.model || !prompt.trim()) return;
  const fields = chosen();
  if (server.chats) fields.messages = [...messages, { role: "user", content: prompt }];
  else fields.prompt = prompt;
  const output = newOutput(fields);
  $("empty").hidden = true;
  const element = document.createElement("div");
  if (server.chats) {
    const asked = document.createElement("div");
    asked.className = "message user";
    asked.textContent = prompt;
    element.className = "message";
    $("log").append(asked, element);
  } else {
    const given = document.createElement("span");
    given.className = "given";
    given.textContent = prompt;
    element.className = "message text";
    element.append(given);
    $("log").append(element);
  }
  output.element = element;
  element.output = output;
  show(output);
  $("prompt").value = "";
  say("Generating.");
  const end = await run((signal) => generate(output, signal, (pieces) => {
    append(output, pieces);
    showFigures();
  }));
  if (end !== "failed" && server.chats && output.text) {
    messages = [...fields.messages, { role: "assistant", content: output.text }];
  }
  if (end !== "done" && !output.text) $("prompt").value = prompt;
  showFigures();
  const told = `${output.accepted} of ${output.drafted} drafted tokens accepted`;
  if (end === "done") say(`Done: ${output.numTokens} tokens, ${told}.`);
  $("compare").disabled = !output.text;
}

async function compare() {
  const output = shown;
  if (running || !output) return;
  const plain = newOutput(withoutSpeculation(output.fields));
  plain.fields.max_tokens = Math.max(1, output.numTokens);
  $("comparison").textContent = "Plain decoding runs…";
  const end = await run((signal) => generate(plain, signal, () => {
    $("plain-speed").textContent = rate(plain);
  }));
  output.plain = plain;
  showFigures();
  $("comparison").textContent = end === "done" ? verdict(output, plain) : "";
}

function verdict(output, plain) {
  const fast = speed(output);
  const slow = speed(plain);
  if (!fast || !slow) return "The output is too short to measure its speed.";
  const differ = output.fields.temperature ? "are two random draws" : "differ";
  const same = `The outputs ${output.text === plain.text ? "are equal" : differ}.`;
  return `Speculation is ${(fast / slow).toFixed(2)} times as fast here. ${same}`;
}

// ---------------------------------------------------------------------------------- display

function append(output, pieces) {
  const log = $("log");
  const follows = log.scrollHeight - log.scrollTop - log.clientHeight < 80;
  for (const { text, origin } of pieces) {
    const token = document.createElement("span");
    token.className = "token";
    token.classList.add(origin);
    token.dataset.round = Math.max(0, output.rounds.length - 1);
    token.append(document.createTextNode(text));
    output.element.append(token);
  }
  if (follows) log.scrollTop = log.scrollHeight;
}

function rate(output) {
  const value = speed(output);
  return value === null ? "–" : value.toFixed(value < 10 ? 1 : 0);
}

function show(output) {
  if (shown?.element) mark(shown, null);
  shown = output;
  $("comparison").textContent = "";
  $("compare").disabled = !output?.text || Boolean(running);
  showFigures();
}

function showFigures() {
  const output = shown;
  const some = output && output.rounds.length > 0;
  $("accepted").textContent = some ? `${output.accepted} / ${output.drafted}` : "–";
  $("per-round").textContent = some ? (output.numTokens / output.rounds.length).toFixed(2) : "–";
  $("speed").textContent = output ? rate(output) : "–";
  $("plain-speed").textContent = output?.plain ? rate(output.plain) : "–";
  showRound(output?.selected ?? null);
}

/** Shows a round of the output by its index; null shows the latest one. */
function showRound(index) {
  const num = shown ? shown.rounds.length : 0;
  const at = index === null ? num - 1 : Math.min(Math.max(index, 0), num - 1);
  for (const id of ["round", "before", "after"]) $(id).disabled = num < 2;
  $("drafted").hidden = num === 0;
  if (num === 0) {
    $("round-title").textContent = "No round yet.";
    return;
  }
  $("round").max = num;
  $("round").value = at + 1;
  $("before").disabled ||= at === 0;
  $("after").disabled ||= at === num - 1;
  const round = shown.rounds[at];
  const accepted = round.drafted.filter((token) => token.outcome === "accepted").length;
  $("round-title").textContent =
    `Round ${at + 1} of ${num}: ${round.drafted.length} drafted, ${accepted} accepted`;
  $("drafted").tBodies[0].replaceChildren(...rows(round));
  mark(shown, index === null ? null : at);
}

function rows(round) {
  const drafted = round.drafted;
  const isTree = drafted.some((token, i) => token.parent !== (i ? i - 1 : null));
  const made = depthFirst(drafted).map(([token, depth]) =>
    row(token, token.outcome, reason(token, isTree), isTree ? depth : 0));
  if (round.next) {
    const origin = round.next.origin;
    made.push(row({ ...round.next, q: null }, origin, WHO[origin], 0));
  }
  return made;
}

/** The drafted tokens with their depths, each followed by its descendants. */
function depthFirst(drafted) {
  const below = (parent, depth) => drafted.flatMap((token, i) =>
    token.parent === parent ? [[token, depth], ...below(i, depth + 1)] : []);
  return below(null, 0);
}

function row(token, kind, why, depth) {
  const line = document.createElement("tr");
  line.className = kind;
  const name = document.createElement("td");
  const mark = document.createElement("span");
  name.className = "name";
  name.style.setProperty("--depth", depth);
  mark.className = `token ${kind}`;
  mark.textContent = visible(token.token);
  name.append(mark);
  const about = document.createElement("td");
  about.textContent = why;
  line.append(name, number(token.p), number(token.q), about);
  return line;
}

function number(value) {
  const cell = document.createElement("td");
  cell.className = "number";
  cell.textContent = value === null ? "–" : value < 0.0005 && value > 0 ? "<0.001" : value.toFixed(3);
  cell.style.setProperty("--share", value ?? 0);
  return cell;
}

const visible = (text) => text.replaceAll(" ", "␣").replaceAll("\n", "↵").replaceAll("\t", "⇥");

function reason(token, isTree) {
  const chance = token.acceptance;
  const isGreedy = shown.fields.temperature === 0;
  if (token.outcome === "dropped") return "accepted, but the output ended before it";
  if (token.outcome === "skipped") {
    return isTree ? "not compared: another branch was taken" : "not compared: after a rejected token";
  }
  if (isGreedy && (chance === 0 || chance === 1)) {
    const own = `the model gives it ${percent(Math.exp(token.logprob))}`;
    return token.outcome === "accepted"
      ? `accepted: the target's argmax (${own})`
      : `rejected: not the target's argmax (${own})`;
  }
  if (chance === null) return token.outcome;
  return token.outcome === "accepted"
    ? `accepted (its chance: ${percent(chance)})`
    : `rejected (its chance: ${percent(chance)})`;
}

const percent = (value) => `${(100 * value).toFixed(value > 0.1 ? 0 : 1)} %`;

function mark(output, index) {
  for (const token of output.element.querySelectorAll(".chosen")) token.classList.remove("chosen");
  if (index === null) return;
  for (const token of output.element.querySelectorAll(`[data-round="${index}"]`)) {
    token.classList.add("chosen");
  }
}

function select(index) {
  if (!shown) return;
  shown.selected = index;
  showRound(index);
}

function setRunning(is) {
  $("stop").disabled = !is;
  $("send").disabled = is || !server.model;
  $("clear").disabled = is;
  $("compare").disabled = is || !shown?.text;
}

function say(text) {
  $("status").textContent = text;
}

function fail(text) {
  $("error").hidden = !text;
  $("error").textContent = text || "";
}

function askForKey() {
  $("settings").open = true;
  $("key").focus();
}

function start() {
  connect().catch((error) => {
    $("model").textContent = "not connected";
    fail(error.message);
  });
}

// ----------------------------------------------------------------------------------- events

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
$("prompt").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") running?.abort();
});
$("stop").addEventListener("click", () => running?.abort());
$("compare").addEventListener("click", compare);
$("clear").addEventListener("click", () => {
  messages = [];
  show(null);
  $("empty").hidden = false;
  $("log").replaceChildren($("empty"));
  $("prompt").focus();
});
$("log").addEventListener("click", (event) => {
  const token = event.target.closest(".token");
  if (!token) return;
  const output = token.closest(".message").output;
  if (output !== shown) show(output);
  select(Number(token.dataset.round));
});
$("round").addEventListener("input", () => select($("round").value - 1));
$("before").addEventListener("click", () => select($("round").value - 2));
$("after").addEventListener("click", () => select(Number($("round").value)));
$("settings").addEventListener("input", showSettings);
$("key").addEventListener("change", () => {
  sessionStorage.setItem("outrider-key", $("key").value);
  start();
});
$("theme").addEventListener("change", () => {
  const theme = $("theme").value;
  if (theme) localStorage.setItem("outrider-theme", theme);
  else localStorage.removeItem("outrider-theme");
  paint(theme);
});

function paint(theme) {
  if (theme) document.documentElement.dataset.theme = theme;
  else delete document.documentElement.dataset.theme;
}

const theme = localStorage.getItem("outrider-theme") || "";
$("theme").value = theme;
$("key").value = sessionStorage.getItem("outrider-key") || "";
paint(theme);
showSettings();
if (NARROW.matches) $("settings").open = false;
$("prompt").focus();
start();
