// A small part of Markdown as DOM nodes: fences, headings, lists, paragraphs; code and bold in a line. The text is a
// model's, so hostile: it becomes text nodes and nothing else, links stay text, and the work grows with its length.

import { el } from "./parts.js";

const FENCE = /^([ \t]*)(`{3,}|~{3,})[ \t]*([^`]*)$/;
const HEADING = /^ {0,3}#{1,6}[ \t]+(.+)$/;
const ITEM = /^([ \t]*)([-*+]|\d{1,9}[.)])[ \t]+(.*)$/;
const RULE = /^(-+|\*+|_+)$/;
const MAX_DEPTH = 6; // of lists

export function markdown(text) {
  const lines = text.split("\n");
  const blocks = [];
  let paragraph = [];
  let at = 0;
  const flush = () => {
    if (paragraph.length) blocks.push(el("p", "", ...inline(paragraph.join("\n"))));
    paragraph = [];
  };
  while (at < lines.length) {
    const line = lines[at];
    const fence = FENCE.exec(line);
    const heading = HEADING.exec(line);
    if (fence) {
      flush();
      const [block, next] = code(lines, at, fence);
      blocks.push(block);
      at = next;
    } else if (ITEM.test(line) && !isRule(line)) {
      flush();
      const [block, next] = list(lines, at);
      blocks.push(block);
      at = next;
    } else {
      if (line.trim() === "" || heading || isRule(line)) flush();
      if (heading) blocks.push(el("p", "heading", ...inline(heading[1])));
      else if (isRule(line)) blocks.push(el("hr"));
      else if (line.trim() !== "") paragraph.push(line);
      at += 1;
    }
  }
  flush();
  return blocks;
}

function isRule(line) {
  const bare = line.replaceAll(/[ \t]/g, "");
  return bare.length >= 3 && RULE.test(bare);
}

// A fence without its end goes to the end of the text: it is still being written.
function code(lines, start, [, indent, mark, language]) {
  const inside = [];
  let at = start + 1;
  for (; at < lines.length; at += 1) {
    const bare = lines[at].trim();
    if (bare.length >= mark.length && bare === mark[0].repeat(bare.length)) break;
    inside.push(lines[at].startsWith(indent) ? lines[at].slice(indent.length) : lines[at].trimStart());
  }
  const block = el("pre", "code", el("code", "", inside.join("\n")));
  block.tabIndex = 0; // scrolls
  if (language.trim()) block.dataset.language = language.trim().slice(0, 30);
  return [block, at + 1];
}

function list(lines, start) {
  const open = []; // {indent, element}: the lists that the next item may belong to, outermost first
  let root = null;
  let item = null;
  let at = start;
  for (; at < lines.length; at += 1) {
    const line = lines[at];
    const found = isRule(line) ? null : ITEM.exec(line);
    if (found) {
      const [, { length: indent }, mark, text] = found;
      while (open.length > 1 && indent < open.at(-1).indent) open.pop();
      if (!open.length || (item && indent > open.at(-1).indent + 1 && open.length < MAX_DEPTH)) {
        const element = el(/\d/.test(mark) ? "ol" : "ul");
        if (/\d/.test(mark)) element.start = parseInt(mark, 10);
        if (item) item.append(element);
        root ??= element;
        open.push({ indent, element });
      }
      item = el("li", "", ...inline(text));
      open.at(-1).element.append(item);
    } else if (line.trim() === "") {
      const next = lines[at + 1] ?? "";
      if (!ITEM.test(next) && !/^[ \t]{2,}\S/.test(next)) break;
    } else if (/^[ \t]{2,}/.test(line) && FENCE.test(line)) {
      const [block, next] = code(lines, at, FENCE.exec(line));
      item.append(block);
      at = next - 1;
    } else if (/^[ \t]{2,}/.test(line)) {
      item.append("\n", ...inline(line.trim()));
    } else {
      break;
    }
  }
  return [root, at];
}

// Text with `code` and **bold**: what has no end is text.
export function inline(text) {
  const nodes = [];
  const marks = /`+|\*\*/g;
  const endless = new Set(); // marks without an end after here
  let plain = 0; // where text begins that is in no node yet
  for (let found = marks.exec(text); found; found = marks.exec(text)) {
    const [mark] = found;
    const from = marks.lastIndex;
    const end = endless.has(mark) ? -1 : endOf(text, mark, from);
    if (end < 0) {
      endless.add(mark);
    } else if (end > from) {
      if (found.index > plain) nodes.push(text.slice(plain, found.index));
      const inside = text.slice(from, end);
      nodes.push(mark === "**" ? el("strong", "", ...inline(inside)) : el("code", "", inside));
      plain = marks.lastIndex = end + mark.length;
    }
  }
  if (plain < text.length) nodes.push(text.slice(plain));
  return nodes;
}

// Where `mark` stands again: backticks as a run of the same length.
function endOf(text, mark, from) {
  let at = text.indexOf(mark, from);
  while (at >= 0 && mark[0] === "`" && text[at + mark.length] === "`") {
    let next = at + mark.length;
    while (text[next] === "`") next += 1;
    at = text.indexOf(mark, next);
  }
  return at;
}
