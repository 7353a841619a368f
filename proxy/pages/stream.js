// One streamed answer of /v1/chat/completions: what the server sent, put together, with the times at which it came here.

import { authorization } from "./parts.js";

const DONE = "[DONE]";
const LINE_END = /\r\n|\n|\r/g;
const MAX_PLAIN_ERROR = 500;
const MAX_CALLS = 128; // of one answer

// Server-sent events out of text that was cut anywhere: the data of each event, in order.
export class EventParser {
  #rest = "";
  #from = 0; // where no line end was found yet
  #data = [];

  push(text) {
    this.#rest += text;
    const events = [];
    let start = 0;
    LINE_END.lastIndex = this.#from;
    for (let found = LINE_END.exec(this.#rest); found; found = LINE_END.exec(this.#rest)) {
      const end = found.index + found[0].length;
      if (found[0] === "\r" && end === this.#rest.length) break; // its \n may still come
      this.#line(this.#rest.slice(start, found.index), events);
      start = end;
    }
    this.#rest = this.#rest.slice(start);
    this.#from = Math.max(0, this.#rest.length - 1);
    return events;
  }

  #line(line, events) {
    if (line === "") {
      if (this.#data.length) events.push(this.#data.join("\n"));
      this.#data = [];
    } else if (line.startsWith("data:")) {
      this.#data.push(line.slice(line[5] === " " ? 6 : 5));
    }
  }
}

export class Answer {
  content = "";
  reasoning = "";
  calls = []; // {id, name, arguments}, arguments as the model wrote them
  finish = null;
  usage = null;
  trace = null;
  requestId = "";
  status = 0;
  error = null; // {message, type, param, code} of the server, or {message} of this page
  isComplete = false; // the server said that this is the end
  isStopped = false; // by whoever sits here
  isRunning = true;
  sentAt = performance.now();
  firstAt = null;
  lastAt = null;
  endedAt = null;

  // Milliseconds; null: not known.
  get firstMs() {
    return this.firstAt === null ? null : this.firstAt - this.sentAt;
  }

  get totalMs() {
    return (this.endedAt ?? performance.now()) - this.sentAt;
  }

  // Tokens a second after the first one; null where two tokens or the time between them are not there.
  get rate() {
    const tokens = this.usage ? this.usage.completion_tokens : 0;
    const ms = this.firstAt === null ? 0 : this.lastAt - this.firstAt;
    return tokens > 1 && ms >= 1 ? ((tokens - 1) / ms) * 1000 : null;
  }

  get isEmpty() {
    return !this.content && !this.reasoning && !this.calls.length;
  }

  take(data) {
    if (data === DONE) {
      this.isComplete = this.error === null;
      return;
    }
    const chunk = JSON.parse(data);
    if (chunk.error) {
      this.error = chunk.error;
      return;
    }
    if (Number.isInteger(chunk.usage?.prompt_tokens)) this.usage = chunk.usage;
    if (chunk.tandem?.decode_node && chunk.tandem.seconds) this.trace = chunk.tandem;
    for (const choice of chunk.choices ?? []) {
      if (choice.index !== 0) continue; // this page shows one answer
      this.finish = choice.finish_reason ?? this.finish;
      this.#add(choice.delta ?? {});
    }
  }

  #add(delta) {
    const reasoning = delta.reasoning_content ?? delta.reasoning ?? "";
    const content = delta.content ?? "";
    const calls = delta.tool_calls ?? [];
    if (!reasoning && !content && !calls.length) return;
    this.lastAt = performance.now();
    this.firstAt ??= this.lastAt;
    this.reasoning += reasoning;
    this.content += content;
    for (const part of calls) {
      const index = part.index ?? 0;
      if (!Number.isInteger(index) || index < 0 || index >= MAX_CALLS) continue;
      const call = (this.calls[index] ??= { id: "", name: "", arguments: "" });
      call.id = part.id ?? call.id;
      call.name += part.function?.name ?? "";
      call.arguments += part.function?.arguments ?? "";
    }
  }
}

// Fills `answer` and calls `onChange` after each piece. Never throws: what went wrong is in the answer.
export async function ask(body, answer, signal, onChange) {
  try {
    const response = await fetch("v1/chat/completions", {
      method: "POST",
      headers: { "Content-Type": "application/json", "X-Tandem-Trace": "1", ...authorization() },
      body: JSON.stringify(body),
      signal,
    });
    answer.requestId = response.headers.get("X-Request-Id") ?? "";
    answer.status = response.status;
    if (response.ok) await read(response, answer, onChange);
    else answer.error = await readError(response);
  } catch (error) {
    if (signal.aborted) answer.isStopped = true;
    else answer.error = { message: answer.status ? "The stream broke: " + error.message : "The proxy does not answer: " + error.message };
  }
  answer.endedAt = performance.now();
  answer.isRunning = false;
  answer.calls = answer.calls.filter(Boolean);
  onChange();
}

async function read(response, answer, onChange) {
  const parser = new EventParser();
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let { done, value } = await reader.read(); !done; { done, value } = await reader.read()) {
    const events = parser.push(value);
    events.forEach((data) => answer.take(data));
    if (events.length) onChange();
  }
}

async function readError(response) {
  const text = await response.text();
  try {
    const { error } = JSON.parse(text);
    if (typeof error.message === "string") return error;
  } catch {
    // Not an error of an OpenAI API: shown as it came.
  }
  return { message: text.slice(0, MAX_PLAIN_ERROR) || response.statusText };
}
