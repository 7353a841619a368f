// What both pages are made of: elements, figures in words, bars, the API key. Text goes in as text only: nothing is ever
// parsed as HTML.

const KEY = "tandem-api-key";
const PHASES = {
  proxy_queue: ["proxy queue", "queue"],
  tokenize: ["tokenise", "tokenize"],
  prefill_queue: ["prefill queue", "queue"],
  prefill: ["prefill", "prefill"],
  transfer: ["transfer", "transfer"],
  decode_queue: ["decode queue", "queue"],
  first_token: ["first token", "first_token"],
};

export const byId = (id) => document.getElementById(id);

export function el(tag, className, ...children) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  made.append(...children);
  return made;
}

// Writes only what differs, so that screen readers and open details are left alone.
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export function same(element, key, build) {
  const value = JSON.stringify(key);
  if (element.dataset.key === value) return;
  element.dataset.key = value;
  element.replaceChildren(...build());
}

// Makes the children of `parent` like `wanted` and leaves alone what is like it already: folds stay open, the focus and what
// is selected stay where they are while text grows.
export function patch(parent, wanted) {
  const had = [...parent.childNodes];
  wanted.forEach((node, index) => {
    const old = had[index];
    if (!old) parent.append(node);
    else if (old.nodeName !== node.nodeName || old.className !== node.className) old.replaceWith(node);
    else if (old.nodeType === Node.TEXT_NODE) {
      if (node.data.startsWith(old.data)) old.appendData(node.data.slice(old.data.length));
      else old.data = node.data;
    } else {
      for (const { name, value } of node.attributes) if (name !== "open") old.setAttribute(name, value);
      patch(old, [...node.childNodes]);
    }
  });
  had.slice(wanted.length).forEach((node) => node.remove());
}

export const number = (value) => Math.round(value).toLocaleString("en-US");
export const count = (value, noun) => number(value) + " " + noun + (value === 1 ? "" : "s");
export const percent = (share) => (share * 100).toFixed(share > 0 && share < 0.1 ? 1 : 0) + " %";

export function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return (unit && value < 100 ? value.toFixed(1) : Math.round(value)) + " " + units[unit];
}

export function seconds(value) {
  if (value < 0.001) return Math.round(value * 1e6) + " µs";
  if (value < 1) return (value * 1000).toFixed(value < 0.1 ? 1 : 0) + " ms";
  return value < 120 ? value.toFixed(2) + " s" : Math.floor(value / 60) + " min " + Math.round(value % 60) + " s";
}

export function duration(value) {
  const parts = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]].map(([size, unit], index, all) =>
    [Math.floor(index ? (value % all[index - 1][0]) / size : value / size), unit]);
  const first = parts.findIndex(([amount]) => amount > 0);
  if (first < 0) return "0 s";
  return parts.slice(first, first + 2).map(([amount, unit]) => amount + " " + unit).join(" ");
}

// parts: [[label, css class, amount, text]]; what a bar says in colour its label says in words.
export function bar(title, parts) {
  const made = el("div", "bar");
  made.setAttribute("role", "img");
  made.setAttribute("aria-label", title + ": " + parts.map(([label, , , text]) => label + " " + text).join(", "));
  made.title = parts.map(([label, , , text]) => label + ": " + text).join("\n");
  for (const [, className, amount] of parts) {
    if (amount <= 0) continue;
    const part = el("i", className);
    part.style.flexGrow = String(amount * 1e6); // sums below 1 would not fill the bar
    made.append(part);
  }
  return made;
}

export function pairs(entries) {
  return el("dl", "", ...entries.flatMap(([name, value]) => [el("dt", "", name), el("dd", "", value)]));
}

// [[label, css class, amount, text]] of a request's time: the phases that its trace tells, in order, and what is left
// before and after the first token. first: seconds to the first token, null: none yet; total: seconds up to its end.
export function timeline(phases, first, total, restLabel) {
  const parts = Object.entries(PHASES)
    .filter(([name]) => phases[name] > 0)
    .map(([name, [label, group]]) => [label, "p-" + group, phases[name], seconds(phases[name])]);
  const known = parts.reduce((sum, part) => sum + part[2], 0);
  const add = (label, group, value) => {
    if (value > 0.0005) parts.push([label, "p-" + group, value, seconds(value)]);
  };
  if (first === null) {
    add(restLabel, "other", total - known);
  } else {
    add(known ? "not accounted for" : "up to the first token", "other", first - known);
    add("more tokens", "decode", total - Math.max(first, known));
  }
  return parts;
}

// What of a prompt moved between nodes; "" when nothing was said about it.
export function moved(trace) {
  if (!trace.transferred_bytes) return trace.transferred_bytes === 0 ? "nothing moved" : "";
  return bytes(trace.transferred_bytes) + " moved (" + count(trace.transferred_blocks, "block") + ", " +
    count(trace.transferred_states, "state") + ")";
}

export function where(trace) {
  if (!trace.decode_node) return "no node yet";
  const named = (role, name) => name.startsWith(role) ? name : role + " " + name;
  return trace.prefill_node ? named("prefill", trace.prefill_node) + " → " + named("decode", trace.decode_node)
    : "all on " + trace.decode_node;
}

// --- the API key, kept in this tab until it is closed, and only when somebody has given one

export const hasKey = () => Boolean(sessionStorage.getItem(KEY));

export function authorization() {
  const key = sessionStorage.getItem(KEY);
  return key ? { Authorization: "Bearer " + key } : {};
}

export function forgetKey() {
  sessionStorage.removeItem(KEY);
}

// Takes the key out of its field, which keeps nothing.
export function keepKey(input) {
  // What no header can carry cannot be a key; fetch would throw on it.
  const given = input.value.trim().replace(/[^\x21-\x7e]/g, "");
  input.value = "";
  if (given) sessionStorage.setItem(KEY, given);
}
