// The fields of a request that the fold holds, and what a request looks like for other clients.

import { byId } from "./parts.js";

const NUMBERS = [
  "temperature", "top_p", "top_k", "min_p", "max_tokens", "seed", "presence_penalty", "frequency_penalty", "repetition_penalty",
];
const CHOICES = ["reasoning_effort", "tool_choice"];

// What somebody typed cannot be sent; `input` is where.
export class FieldError extends Error {
  constructor(input, message) {
    super(message);
    this.input = input;
  }
}

function json(id, what, isRight) {
  const input = byId(id);
  if (!input.value.trim()) return null;
  let value;
  try {
    value = JSON.parse(input.value);
  } catch (error) {
    throw new FieldError(input, what + " must be JSON: " + error.message);
  }
  if (!isRight(value)) throw new FieldError(input, what);
  return value;
}

// The fields that were filled in; all others are left to the server. Raises FieldError.
export function readSettings() {
  const fields = {};
  for (const name of NUMBERS) {
    const input = byId(name);
    if (input.validity.badInput) throw new FieldError(input, name + " must be a number");
    if (input.value !== "") fields[name] = Number(input.value);
  }
  for (const name of CHOICES) {
    if (byId(name).value) fields[name] = byId(name).value;
  }
  const stop = byId("stop-strings").value.split("\n").filter(Boolean);
  if (stop.length) fields.stop = stop;
  const tools = json("tools", "Tools must be a list of tools", Array.isArray);
  if (tools) fields.tools = tools;
  const more = json("more", "Other fields must be one object", (value) => value !== null && typeof value === "object" && !Array.isArray(value));
  return { ...fields, ...more };
}

export function readSystem() {
  const content = byId("system").value.trim();
  return content ? [{ role: "system", content }] : [];
}

export function showFieldError(error) {
  clearFieldErrors();
  byId("settings").open = true;
  const box = byId("field-error");
  box.textContent = error.message;
  box.hidden = false;
  error.input.setAttribute("aria-invalid", "true");
  error.input.setAttribute("aria-describedby", "field-error");
  error.input.closest("details").open = true;
  error.input.focus();
}

export function clearFieldErrors() {
  byId("field-error").hidden = true;
  for (const input of document.querySelectorAll("[aria-invalid]")) {
    input.removeAttribute("aria-invalid");
    input.removeAttribute("aria-describedby");
  }
}

export const asJson = (body) => JSON.stringify(body, null, 2);

// A command for a shell. The key is named, not shown.
export function asCurl(body, hasKey) {
  const quoted = "'" + asJson(body).replaceAll("'", "'\\''") + "'";
  const url = new URL("v1/chat/completions", document.baseURI);
  const key = hasKey ? ' \\\n  -H "Authorization: Bearer $TANDEM_API_KEY"' : "";
  return `curl -N '${url}' \\\n  -H 'Content-Type: application/json' -H 'X-Tandem-Trace: 1'${key} \\\n  -d ${quoted}`;
}
