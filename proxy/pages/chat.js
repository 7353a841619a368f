// The chat page: a conversation that lives in this page alone, sent as a whole with each question.
// A turn is {kind, element} and, by its kind: "user" text and images; "answer" answer (stream.js) and the body that asked for it;
// "tool" id, name and text of a result.

import { answerParts, button, incomplete, isJson, said, toolResult } from "./answer.js";
import { clearImages, content, pictures, receiveImages, waitingImages } from "./images.js";
import { authorization, byId, el, forgetKey, hasKey, keepKey, number, patch, say } from "./parts.js";
import { asCurl, asJson, clearFieldErrors, FieldError, readSettings, readSystem, showFieldError } from "./settings.js";
import { Answer, ask } from "./stream.js";

const DRAW_MS = 40; // between two drawings of a growing answer, at least
const DRAW_SHARE = 4; // and this many times as long as the last one took
const AGAIN_MS = 3000;
const WIDE = matchMedia("(min-width: 1000px)");
const TOUCH = matchMedia("(pointer: coarse)");
const NEAR_END_PX = 120;
const NEWS_CHARS = 2000;
const BUILT_IN = "tandem-demo";
const FACTS = "The code word of the mill is amber falcon. The code word of the castle is golden otter.";
const STARTER = FACTS + " What is the code word of the mill?";
const FOLLOW_UP = "What is the code word of the castle?";
const TOOLS = [{
  type: "function",
  function: {
    name: "get_weather",
    description: "The weather of a town.",
    parameters: { type: "object", properties: { town: { type: "string" } }, required: ["town"] },
  },
}];

let turns = [];
let running = null; // {abort} of the answer that is being written

// --- what is asked for

// Half of a surrogate pair is no character, and servers refuse it.
const whole = (text) => text.toWellFormed();

function messages(before) {
  return [...readSystem(), ...before.flatMap((turn) => {
    if (turn.kind === "user") return [{ role: "user", content: content(whole(turn.text), turn.images) }];
    if (turn.kind === "tool") return [{ role: "tool", tool_call_id: turn.id, content: whole(turn.text) }];
    return assistant(turn.answer);
  })];
}

function assistant({ content, reasoning, calls }) {
  // A call that was cut is no JSON, which servers refuse to read.
  const kept = calls.filter((call) => isJson(call.arguments));
  if (!content && !kept.length) return [];
  const message = { role: "assistant", content: whole(content) };
  if (reasoning) message.reasoning_content = whole(reasoning);
  if (kept.length) {
    message.tool_calls = kept.map(({ id, name, arguments: given }) => ({ id, type: "function", function: { name, arguments: given } }));
  }
  return [message];
}

function request(before) {
  return {
    ...(byId("model").value ? { model: byId("model").value } : {}),
    messages: messages(before),
    ...readSettings(),
    stream: true,
    stream_options: { include_usage: true },
  };
}

// --- turns

function add(turn, className, title) {
  turn.element = el("li", "turn " + className, el("h3", "unseen", title), el("div", "body"), el("div", "actions"));
  turns.push(turn);
  byId("turns").append(turn.element);
  return turn;
}

const bodyOf = (turn) => turn.element.querySelector(".body");

// Takes away the turn at `index` and all after it.
function cut(index) {
  for (const turn of turns.splice(index)) turn.element.remove();
  arrange();
}

function addUser(text, images) {
  const turn = add({ kind: "user", text, images }, "user", "You");
  bodyOf(turn).append(...userParts(turn));
}

const userParts = ({ text, images }) => [...pictures(images), ...(text.trim() ? [said(text)] : [])];

function addResult(call, text) {
  const turn = add({ kind: "tool", id: call.id, name: call.name, text }, "tool", "Tool result");
  bodyOf(turn).append(...toolResult(turn));
}

// What can be done with each turn hangs on what is last and on whether an answer is being written.
function arrange() {
  byId("welcome").hidden = turns.length > 0;
  byId("stop").hidden = running === null;
  byId("send").hidden = running !== null;
  byId("turns").classList.toggle("busy", running !== null);
  turns.forEach((turn, index) => {
    const actions = turn.element.querySelector(".actions");
    const wanted = turn.answer?.isRunning ? [] : actionsOf(turn, index);
    if (actions.dataset.key === wanted.map(([label]) => label).join()) return;
    actions.dataset.key = wanted.map(([label]) => label).join();
    actions.replaceChildren(...wanted.map(([label, run]) => button(label, "quiet", run)));
  });
  arrangeResults();
}

function actionsOf(turn, index) {
  const isLast = index === turns.length - 1;
  if (turn.kind === "user") return [["Edit", () => edit(turn)]];
  if (turn.kind !== "answer") return [];
  const actions = [["Request", () => showRequest(turn.body)]];
  if (turn.answer.content && navigator.clipboard) {
    actions.unshift(["Copy", () => navigator.clipboard.writeText(turn.answer.content).then(() => tell("Copied."), () => tell("Not copied."))]);
  }
  if (isLast) actions.unshift([turn.answer.isEmpty ? "Try again" : "Regenerate", () => regenerate(index)]);
  if (isLast && index === 1 && turns[0].text === STARTER && !turn.answer.error) {
    actions.push(["Ask: " + FOLLOW_UP, () => send(FOLLOW_UP)]);
  }
  return actions;
}

// The last answer's tool calls wait for their results.
function arrangeResults() {
  document.querySelector(".results")?.remove();
  const last = turns.at(-1);
  const calls = last?.kind === "answer" ? last.answer.calls.filter((call) => isJson(call.arguments)) : [];
  if (running || !calls.length) return;
  const form = el("form", "results");
  calls.forEach((call, index) => {
    const input = el("textarea", "mono");
    input.id = "result-" + index;
    input.rows = 2;
    const label = el("label", "", "Result of " + call.name);
    label.htmlFor = input.id;
    form.append(label, input);
  });
  form.append(el("div", "row", el("button", "", calls.length > 1 ? "Send results" : "Send result")));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const values = [...form.querySelectorAll("textarea")].map((input) => input.value);
    const size = turns.length;
    calls.forEach((call, index) => addResult(call, values[index]));
    if (!generate()) cut(size);
  });
  last.element.append(form);
}

function edit(turn) {
  const area = el("textarea");
  area.value = turn.text;
  area.rows = Math.min(12, turn.text.split("\n").length + 1);
  area.setAttribute("aria-label", "Your message");
  const leave = () => {
    patch(bodyOf(turn), userParts(turn));
    arrange();
    turn.element.querySelector(".actions button")?.focus();
  };
  const save = () => {
    const index = turns.indexOf(turn);
    if (!(area.value.trim() || turn.images.length) || running || !isReady()) return;
    cut(index);
    send(area.value, turn.images);
  };
  bodyOf(turn).replaceChildren(area, el("div", "row", button("Send", "", save), button("Cancel", "quiet", leave)));
  area.focus();
}

function regenerate(index) {
  if (!isReady()) return;
  cut(index);
  generate();
}

// --- an answer

function isReady() {
  try {
    clearFieldErrors();
    readSettings();
    return true;
  } catch (error) {
    if (!(error instanceof FieldError)) throw error;
    showFieldError(error);
    return false;
  }
}

function send(text, images = []) {
  if (running || !isReady()) return false;
  addUser(text, images);
  return generate();
}

// Asks for what comes after the turns that are there; false when the settings cannot be sent.
function generate() {
  if (!isReady()) return false;
  const body = request(turns);
  const answer = new Answer();
  const turn = add({ kind: "answer", answer, body }, "answer", "Answer");
  const control = new AbortController();
  running = { abort: () => control.abort() };
  turn.element.setAttribute("aria-busy", "true");
  arrange();
  const draw = drawer(turn);
  draw.now();
  scrollTo(0, document.documentElement.scrollHeight);
  tell("Answering.");
  // Where the focus was may be gone with the button that it was on.
  if (!TOUCH.matches) byId("message").focus({ preventScroll: true });
  ask(body, answer, control.signal, draw.later).then(() => {
    draw.now();
    turn.element.removeAttribute("aria-busy");
    // A chat that was begun anew meanwhile has a stream of its own, or none.
    if (!turns.includes(turn)) return;
    running = null;
    following(arrange);
    tell(ending(answer));
    if (answer.status === 401) refuseKey();
  });
  return true;
}

function ending(answer) {
  if (answer.error) return "Failed: " + answer.error.message;
  const why = incomplete(answer);
  const calls = answer.calls.map((call) => "Tool call: " + call.name + ".").join(" ");
  return (why ? why + ". " : "Answer: ") + answer.content.slice(0, NEWS_CHARS) + " " + calls;
}

// One voice for screen readers: a growing answer says nothing until it is there.
function tell(text) {
  byId("news").textContent = text;
}

// Whoever looks at the end goes on looking at it.
function following(change) {
  const page = document.documentElement;
  const isAtEnd = innerHeight + scrollY >= page.scrollHeight - NEAR_END_PX;
  change();
  if (isAtEnd) scrollTo(0, page.scrollHeight);
}

// Draws a growing answer now and then, so that a fast stream or a long text leaves time for everything else.
function drawer(turn) {
  let timer = null;
  let took = 0;
  const now = () => {
    clearTimeout(timer);
    timer = null;
    const start = performance.now();
    following(() => patch(bodyOf(turn), answerParts(turn.answer)));
    took = performance.now() - start;
  };
  const later = () => {
    timer ??= setTimeout(now, Math.max(DRAW_MS, took * DRAW_SHARE));
  };
  return { now, later };
}

function newChat() {
  running?.abort();
  running = null;
  cut(0);
  clearImages();
  tell("New chat.");
  byId("message").focus();
}

// --- the request, for other clients

let shown = null;

function showRequest(body) {
  shown = body;
  drawRequest();
  byId("exported").showModal();
}

function drawRequest() {
  byId("export-text").textContent = byId("export-kind").value === "json" ? asJson(shown) : asCurl(shown, hasKey());
}

function exportAll() {
  if (!isReady()) return;
  const draft = byId("message").value;
  const images = waitingImages();
  showRequest(request(draft.trim() || images.length ? [...turns, { kind: "user", text: draft, images }] : turns));
}

async function copyRequest() {
  const text = byId("export-text");
  getSelection().selectAllChildren(text);
  // Browsers give pages the clipboard only over HTTPS or on this machine; else what is selected can be copied by hand.
  if (navigator.clipboard) await navigator.clipboard.writeText(text.textContent).then(() => tell("Copied."), () => tell("Selected."));
}

// --- the server's state

function setState(words, kind) {
  say(byId("state"), words);
  byId("state").className = "badge " + kind;
}

async function look() {
  let response;
  try {
    response = await fetch("v1/models", { headers: authorization(), cache: "no-store" });
  } catch {
    setState("The proxy does not answer", "bad");
    return setTimeout(look, AGAIN_MS);
  }
  if (response.status === 401) return refuseKey();
  const body = await response.json().catch(() => null);
  if (!response.ok || !Array.isArray(body?.data)) {
    setState(body?.error?.message || "The proxy answers " + response.status, "warn");
    return setTimeout(look, AGAIN_MS);
  }
  const select = byId("model");
  const options = body.data.map(({ id, max_model_len: length }) => {
    const option = el("option", "", id + (length ? ", " + number(length) + " tokens" : ""));
    option.value = id;
    return option;
  });
  select.replaceChildren(...options);
  select.hidden = options.length === 0;
  byId("built-in").hidden = select.value !== BUILT_IN;
  setState("Ready", "good");
}

function refuseKey() {
  say(byId("key-why"), hasKey() ? "That key is not one of this proxy's." : byId("key-why").textContent);
  forgetKey();
  showKey();
  byId("key-form").hidden = false;
  byId("key").focus();
  setState("A key is needed", "warn");
}

function showKey() {
  byId("key-kept").hidden = !hasKey();
}

// --- what people do

function fit() {
  const message = byId("message");
  message.style.height = "auto";
  message.style.height = message.scrollHeight + 2 + "px";
}

byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  const message = byId("message");
  if (!message.value.trim() && !waitingImages().length) return message.focus();
  if (send(message.value, waitingImages())) {
    message.value = "";
    clearImages();
    fit();
  }
});
byId("message").addEventListener("input", fit);
byId("message").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing && !TOUCH.matches) {
    event.preventDefault();
    byId("composer").requestSubmit();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !byId("exported").open) running?.abort();
});
byId("stop").addEventListener("click", () => {
  running?.abort();
  byId("message").focus();
});
byId("new").addEventListener("click", newChat);
byId("export").addEventListener("click", exportAll);
byId("export-kind").addEventListener("change", drawRequest);
byId("export-copy").addEventListener("click", copyRequest);
byId("export-close").addEventListener("click", () => byId("exported").close());
byId("tools-example").addEventListener("click", () => {
  byId("tools").value = JSON.stringify(TOOLS, null, 2);
});
byId("key-forget").addEventListener("click", () => {
  forgetKey();
  showKey();
  look();
});
byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  keepKey(byId("key"));
  byId("key-form").hidden = true;
  showKey();
  look();
  byId("message").focus();
});
byId("starters").append(button(STARTER, "quiet", () => send(STARTER)));
byId("settings").open = WIDE.matches;
receiveImages(tell);
showKey();
arrange();
look();
if (!TOUCH.matches) byId("message").focus();
