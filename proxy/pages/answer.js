// What a turn of the conversation looks like: an answer with its reasoning, its tool calls and its trace, and what was
// said to it.

import { markdown } from "./markdown.js";
import { bar, bytes, count, el, number, pairs, seconds, timeline, where } from "./parts.js";

const FINISHES = { length: "cut at max_tokens or the end of the context", content_filter: "cut by a filter" };

export function button(label, className, onClick) {
  const made = el("button", className, label);
  made.type = "button";
  made.addEventListener("click", onClick);
  return made;
}

function fold(title, className, ...children) {
  return el("details", className, el("summary", "", title), ...children);
}

function pre(text) {
  const made = el("pre", "code", el("code", "", text));
  made.tabIndex = 0;
  return made;
}

// JSON text as lines; null when it is none: not all there yet, never will be, or nested too deep.
function indented(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return null;
  }
}

export const isJson = (text) => indented(text) !== null;

// Text of anybody: its direction is its own and changes nothing around it.
function text(className, ...children) {
  const made = el("div", "text " + className, ...children);
  made.dir = "auto";
  return made;
}

export function said(value) {
  return text("plain-text", value);
}

export function toolResult(turn) {
  return [el("p", "label", "Result of " + turn.name), pre(turn.text)];
}

export function answerParts(answer) {
  const parts = [];
  if (answer.reasoning) {
    const isThinking = answer.isRunning && !answer.content && !answer.calls.length;
    const title = (isThinking ? "Thinking" : "Reasoning") + ", " + count(answer.reasoning.length, "character");
    parts.push(fold(title, "reasoning", text("", ...markdown(answer.reasoning))));
  }
  if (answer.content) parts.push(text("", ...markdown(answer.content)));
  answer.calls.forEach((call) => {
    const note = answer.isRunning || isJson(call.arguments) ? "" : ", cut: not sent again";
    parts.push(fold("Tool call: " + (call.name || "…") + note, "call", pre(indented(call.arguments) ?? call.arguments)));
  });
  if (answer.isRunning) {
    parts.push(el("p", "waiting", answer.isEmpty ? "Waiting for the first token …" : "…"));
    return parts;
  }
  if (answer.error) parts.push(failure(answer));
  const why = incomplete(answer);
  if (why) parts.push(el("p", "badge warn", why));
  if (answer.isComplete && answer.isEmpty) parts.push(el("p", "soft", "An empty answer."));
  if (answer.status === 200) parts.push(trace(answer));
  return parts;
}

// Why an answer is not whole; "" when it is, or when there is none at all.
export function incomplete(answer) {
  if (answer.isStopped) return "Incomplete: stopped by you";
  if (answer.status === 200 && !answer.isComplete) {
    return answer.error ? "Incomplete: it ended with an error" : "Incomplete: the stream broke off";
  }
  return FINISHES[answer.finish] ? "Incomplete: " + FINISHES[answer.finish] : "";
}

export function failure({ error, status }) {
  const facts = [status && status !== 200 ? String(status) : "", error.type, error.code, error.param ? "field " + error.param : ""];
  return el("div", "failure", el("p", "", error.message),
    el("p", "soft", facts.filter((each) => each && typeof each === "string").join(" · ")));
}

// --- the trace

function tiles(entries) {
  return el("dl", "facts", ...entries.filter(([, value]) => value !== null).map(([name, value, unit]) =>
    el("div", "", el("dt", "", name), el("dd", "", value, unit ? el("small", "", " " + unit) : ""))));
}

function trace(answer) {
  const told = answer.trace;
  const usage = answer.usage;
  const first = answer.firstMs === null ? null : answer.firstMs / 1000;
  const total = answer.totalMs / 1000;
  const made = el("section", "trace");
  made.setAttribute("aria-label", "Trace of this answer");
  if (told) made.append(el("p", "place", "Ran on " + where(told)));
  const cached = usage?.prompt_tokens_details?.cached_tokens ?? null;
  made.append(tiles([
    ["prompt", usage ? number(usage.prompt_tokens) : null, "tokens"],
    ["cached", cached === null ? null : number(cached), "tokens"],
    ["computed", cached === null ? null : number(usage.prompt_tokens - cached), "tokens"],
    ["moved", told ? bytes(told.transferred_bytes) : null, ""],
    ["first token", first === null ? null : seconds(first), ""],
    ["speed", answer.rate === null ? null : answer.rate.toFixed(answer.rate < 10 ? 1 : 0), "tokens/s"],
  ]));
  const parts = timeline(told ? told.seconds : {}, first, total, "waiting");
  made.append(bar("Time", parts), legend(parts), fold("Details", "", pairs(details(answer, total))));
  return made;
}

function legend(parts) {
  return el("ul", "legend", ...parts.map(([label, className, , value]) => el("li", "", el("i", className), label + " " + value)));
}

function details(answer, total) {
  const told = answer.trace;
  const usage = answer.usage;
  const reasoning = usage?.completion_tokens_details?.reasoning_tokens;
  const facts = [["total, as this page saw it", seconds(total)]];
  if (told) {
    facts.unshift(
      ["placement", told.placement],
      ["cached on the prefill node", count(told.prefill_cached_tokens, "token")],
      ["cached on the decode node", count(told.decode_cached_tokens, "token")],
      ["moved", count(told.transferred_blocks, "block") + ", " + count(told.transferred_states, "state")],
    );
    if (told.draft_tokens) {
      facts.push(["drafts", number(told.accepted_tokens) + " of " + count(told.draft_tokens, "token") + " were right"]);
    }
    facts.push(["total, as the decode node saw it", seconds(told.seconds.total)]);
  } else {
    facts.unshift(["trace", "none came: it is in the last event of a stream"]);
  }
  if (usage) facts.push(["answer", count(usage.completion_tokens, "token") + (reasoning ? ", " + number(reasoning) + " of them reasoning" : "")]);
  if (answer.finish) facts.push(["finish_reason", answer.finish]);
  if (answer.requestId) facts.push(["request id", answer.requestId]);
  return facts;
}
