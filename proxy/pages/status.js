// Asks status.json once a second and changes what changed.

import {
  authorization, bar, byId, bytes, count, duration, el, forgetKey, hasKey, keepKey, moved, number, pairs, percent, same, say,
  seconds, timeline, where,
} from "./parts.js";

const EVERY_MS = 1000;
const GIVE_UP_MS = 5000;
// As in docs/metrics.md; what is not here failed.
const OUTCOMES = {
  stop: ["done", "good"],
  length: ["done", "good"],
  abort: ["client left", "warn"],
  stall: ["client stood still", "warn"],
  rejected: ["refused", "warn"],
  deadline: ["too late", "warn"],
  capacity: ["no room", "warn"],
};
const STATES = ["used", "leased", "cached", "other", "free"];

const cards = new Map(); // node url -> element
const rows = new Map(); // request id and arrival -> element
let lastGood = null;

// --- nodes

function stateBadge(node) {
  if (node.state === "ready" && !node.answers) return el("span", "badge bad", "no answer");
  return el("span", "badge " + ({ ready: "good", suspect: "bad", gone: "bad" }[node.state] || "warn"), node.state);
}

function pool(title, states) {
  const parts = { used: 0, leased: 0, cached: 0, other: 0, free: 0 };
  let total = 0;
  for (const [name, value] of Object.entries(states)) {
    parts[name in parts ? name : "other"] += value;
    total += value;
  }
  const shown = STATES.map((name) => [name, "s-" + name, parts[name], number(parts[name])]);
  const taken = parts.used + parts.leased + parts.other;
  const head = el("div", "measure-head", el("span", "", title),
    el("span", "num", number(taken) + " in use, " + number(parts.cached) + " cached of " + number(total)));
  return el("div", "measure", head, bar(title, shown));
}

// "joint" is what requests could use; a group that has more than that says what keeps it from being used.
function hits(now, ever) {
  if (!ever || !("joint" in ever)) return "nothing looked up yet";
  const recent = now && "joint" in now ? percent(now.joint) + " in the last minute, " : "";
  const more = Object.keys(ever).filter((group) => ever[group] - ever.joint > 0.005)
    .map((group) => group + " alone " + percent(ever[group]));
  return recent + percent(ever.joint) + " since its start" + (more.length ? "; " + more.join(", ") : "");
}

function nodeParts(node) {
  const parts = [el("div", "card-head", el("h3", "", node.name), el("span", "role", node.role + " node"), stateBadge(node))];
  if (node.reason) parts.push(el("p", "reason", node.reason));
  const figures = node.figures;
  const facts = [["address", node.url]];
  if (!node.is_like_all) {
    facts.push(["model", node.model || "unknown"], ["fingerprint", short(node.fingerprint)]);
  }
  if (node.tensor_parallel_size > 1) facts.push(["ranks", number(node.tensor_parallel_size)]);
  if (figures) {
    if (figures.kv_blocks) parts.push(pool("KV blocks", figures.kv_blocks));
    if (figures.state_slots) parts.push(pool("State slots", figures.state_slots));
    facts.push(["requests", number(figures.requests_running || 0) + " running, " +
      number(figures.requests_waiting || 0) + " waiting, " + node.in_flight + " of this proxy"]);
    facts.push(["hit rate", hits(node.recent_hit_rates, node.hit_rates)]);
    const rates = node.rates || {};
    facts.push(["pulled", bytes(rates.kv_bytes || 0) + "/s KV, " + bytes(rates.state_bytes || 0) + "/s states"]);
    facts.push(["tokens", number(rates.computed_tokens || 0) + "/s computed, " +
      number(rates.generated_tokens || 0) + "/s generated"]);
    if ("prompt_share" in rates) {
      facts.push(["time", percent(rates.prompt_share) + " in steps with prompts, " + percent(rates.decode_share) + " generating"]);
    }
    const drafted = figures.spec_decode_num_draft_tokens_total;
    if (drafted) {
      facts.push(["drafts", percent((figures.spec_decode_num_accepted_tokens_total || 0) / drafted) + " of " +
        number(drafted) + " tokens were right"]);
    }
    if (figures.preemptions_total) facts.push(["preemptions", number(figures.preemptions_total)]);
    const failed = Object.entries(figures.transfer_failures_total || {}).filter(([, value]) => value);
    if (failed.length) facts.push(["failed pulls", failed.map(([why, value]) => why + " " + number(value)).join(", ")]);
    for (const [tier, used] of Object.entries(figures.tier_used_bytes || {})) {
      const hits = (figures.tier_hit_tokens_total || {})[tier] || 0;
      facts.push(["tier " + tier, bytes(used) + ", " + number(hits) + " tokens read back"]);
    }
    const bad = [["read", figures.tier_read_errors_total], ["write", figures.tier_write_errors_total]]
      .flatMap(([op, counts]) => Object.entries(counts || {}).filter(([, value]) => value)
        .map(([why, value]) => op + " " + why + " " + number(value)));
    if (bad.length) facts.push(["tier errors", bad.join(", ")]);
    if (node.age_seconds > 3) facts.push(["figures are", seconds(node.age_seconds) + " old"]);
  } else {
    facts.push(["requests", node.in_flight + " of this proxy; no figures of the node"]);
  }
  parts.push(pairs(facts));
  return parts;
}

const short = (fingerprint) => fingerprint ? fingerprint.slice(0, 16) : "unknown";

// What all nodes serve, or null when they differ or nobody has said.
function common(nodes) {
  const first = nodes.find((node) => node.model);
  const isLike = (node) => !node.model || (node.model === first.model && node.fingerprint === first.fingerprint);
  if (!first || !nodes.every(isLike)) return null;
  return first.model.split("/").filter(Boolean).slice(-2).join("/") + " (" + short(first.fingerprint) + ")";
}

function showNodes(nodes, isLikeAll) {
  for (const node of nodes) {
    let card = cards.get(node.url);
    if (!card) {
      card = el("article", "card");
      cards.set(node.url, card);
      byId("nodes").append(card);
    }
    const shown = { ...node, age_seconds: node.age_seconds > 3 ? node.age_seconds : 0, is_like_all: isLikeAll };
    same(card, shown, () => nodeParts(shown));
    card.classList.toggle("stale", node.state !== "ready" || !node.answers);
  }
  const urls = new Set(nodes.map((node) => node.url));
  for (const [url, card] of cards) {
    if (!urls.has(url)) {
      card.remove();
      cards.delete(url);
    }
  }
}

// --- requests

function place(request) {
  const words = [where(request)];
  if (request.prompt_tokens !== undefined) {
    const cached = [["prefill", request.prefill_cached_tokens], ["decode", request.decode_cached_tokens]]
      .filter(([, value]) => value).map(([role, value]) => number(value) + " on the " + role + " node");
    words.push(number(request.prompt_tokens) + " prompt tokens, cached: " + (cached.join(", ") || "none"));
  }
  words.push(moved(request));
  return words.filter(Boolean).join(" · ");
}

function outcome(request) {
  if (request.running) return ["running", "plain"];
  const status = request.status && request.status !== 200 ? " " + request.status : "";
  const [word, kind] = OUTCOMES[request.outcome] || [request.outcome, "bad"];
  return [word + status, kind];
}

function requestParts(request) {
  const known = Object.values(request.seconds).reduce((sum, value) => sum + value, 0);
  const first = request.ttft_seconds === null ? (known || null) : request.ttft_seconds;
  const parts = timeline(request.seconds, first, request.total_seconds,
    request.running ? "waiting so far" : "no report of phases");
  const [word, kind] = outcome(request);
  const time = new Date(request.arrived * 1000).toLocaleTimeString("en-GB");
  const head = el("div", "request-head",
    el("span", "num", time), el("span", "badge " + kind, word),
    el("span", "", request.route + (request.prompts > 1 ? " × " + request.prompts : "")),
    el("span", "id", request.request_id.slice(0, 20)),
    el("span", "total num", (first !== null ? "first token " + seconds(first) + ", " : "") + "total " + seconds(request.total_seconds)));
  const facts = [
    ["request id", request.request_id],
    ["placement", request.placement || "not reported"],
    ["cached on decode node", String(request.decode_cached_tokens ?? "not reported")],
    ["cached on prefill node", String(request.prefill_cached_tokens ?? "not reported")],
    ...parts.map(([label, , , text]) => [label, text]),
  ];
  return [head, bar("Timeline", parts), el("div", "where", place(request)), facts];
}

function showRequests(requests) {
  byId("no-requests").hidden = requests.length > 0;
  const list = byId("requests");
  const seen = new Set();
  let previous = null;
  for (const request of requests) {
    const key = request.request_id + " " + request.arrived;
    seen.add(key);
    let row = rows.get(key);
    if (!row) {
      const details = el("details", "", el("summary", "", "Phases"), el("div", ""));
      row = el("li", "", el("div", ""), details);
      rows.set(key, row);
    }
    const [shown, details] = row.children;
    if (row.dataset.key !== JSON.stringify(request)) {
      row.dataset.key = JSON.stringify(request);
      const [head, line, words, facts] = requestParts(request);
      shown.replaceChildren(head, line, words);
      details.lastElementChild.replaceChildren(pairs(facts));
    }
    const wanted = previous ? previous.nextElementSibling : list.firstElementChild;
    if (wanted !== row) list.insertBefore(row, wanted);
    previous = row;
  }
  for (const [key, row] of rows) {
    if (!seen.has(key)) {
      row.remove();
      rows.delete(key);
    }
  }
}

// --- the page

function median(values) {
  const sorted = [...values].sort((a, b) => a - b);
  return sorted[Math.floor(sorted.length / 2)];
}

function showTiles(status, down) {
  const sum = (name) => status.nodes.filter((node) => !down.includes(node))
    .reduce((total, node) => total + ((node.rates || {})[name] || 0), 0);
  const firsts = status.requests.map((request) => request.ttft_seconds).filter((value) => value !== null);
  const known = status.requests.filter((request) => request.prompt_tokens > 0);
  const prompts = known.reduce((total, request) => total + request.prompt_tokens, 0);
  const cachedOf = (request) => Math.max(request.prefill_cached_tokens || 0, request.decode_cached_tokens || 0);
  const cached = known.reduce((total, request) => total + Math.min(request.prompt_tokens, cachedOf(request)), 0);
  const waiting = status.waiting ? ", " + number(status.waiting) + " waiting" : "";
  const tiles = [
    ["nodes up", String(status.nodes.length - down.length), "of " + status.nodes.length, down.length > 0],
    ["requests in work" + waiting, number(status.running), "of at most " + number(status.max_concurrency), waiting !== ""],
    ["to the first token, median of " + firsts.length, firsts.length ? seconds(median(firsts)) : "–", "", false],
    ["of the last prompts was cached", prompts ? percent(cached / prompts) : "–", "", false],
    ["tokens generated a second", number(sum("generated_tokens")), "", false],
    ["prompt tokens computed a second", number(sum("computed_tokens")), "", false],
  ];
  const kept = Object.entries(status.targets_kept || {});
  for (const [target, share] of kept) {
    tiles.push([target === "ttft" ? "of first tokens were in time" : "of answers came in time, token by token", percent(share), "", share < 0.9]);
  }
  const wanted = Object.entries(status.recommended_nodes || {}).map(([role, count]) => number(count) + " " + role).join(", ");
  if (wanted) tiles.push(["nodes that the load asks for", wanted, "", false]);
  same(byId("tiles"), tiles, () => tiles.map(([name, value, unit, isAlarm]) =>
    el("div", "tile" + (isAlarm ? " alarm" : ""), el("dt", "", name),
      el("dd", "", value + " ", el("small", "", unit)))));
}

function show(status) {
  const down = status.nodes.filter((node) => node.state !== "ready" || !node.answers);
  const served = common(status.nodes);
  const well = status.ready && !down.length;
  const words = !status.ready ? "Not ready: " + status.reasons.join("; ")
    : down.length ? "Serving, but not all nodes: " + down.map((node) => node.name).join(", ") : "Serving";
  const summary = byId("summary");
  say(summary, words);
  summary.className = "badge " + (well ? "good" : status.ready ? "warn" : "bad");
  say(byId("numbers"), (served ? served + " · " : "") + "version " + (status.version || "unknown") + " · up " +
    duration(status.uptime_seconds));
  document.title = (well ? "" : "! ") + "Tandem";
  showTiles(status, down);
  showNodes(status.nodes, served !== null);
  showRequests(status.requests);
}

function askForKey(why) {
  byId("content").hidden = true;
  if (byId("key-form").hidden) {
    byId("key-form").hidden = false;
    byId("key").focus();
  }
  if (why) say(byId("key-why"), why);
  const summary = byId("summary");
  say(summary, "A key is needed");
  summary.className = "badge warn";
}

async function look() {
  const answer = await fetch("status.json", {
    headers: authorization(),
    cache: "no-store",
    signal: AbortSignal.timeout(GIVE_UP_MS),
  });
  if (answer.status === 401) {
    askForKey(hasKey() ? "That key is not one of this proxy's." : "");
    forgetKey();
    return false;
  }
  if (!answer.ok) throw new Error("the proxy answers " + answer.status);
  const status = await answer.json();
  byId("key-form").hidden = true;
  byId("content").hidden = false;
  show(status);
  lastGood = Date.now();
  byId("content").classList.remove("stale");
  return true;
}

let timer = null;
let isLooking = false;

async function tick() {
  clearTimeout(timer);
  timer = null;
  if (document.hidden || isLooking) return; // goes on when somebody looks again
  let again = true;
  isLooking = true;
  try {
    again = await look();
  } catch (error) {
    const summary = byId("summary");
    summary.className = "badge bad";
    const when = lastGood ? " What is below is of " + new Date(lastGood).toLocaleTimeString("en-GB") + "." : "";
    say(summary, "The proxy does not answer." + when);
    byId("content").classList.add("stale");
  } finally {
    isLooking = false;
  }
  if (again) timer = setTimeout(tick, EVERY_MS);
}

document.addEventListener("visibilitychange", tick);
byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  keepKey(byId("key"));
  tick();
});
tick();
