// Markdown as elements of the page. marked only splits the text into its parts. We make every element ourselves and set
// text by textContent, so nothing in an answer becomes HTML, runs, or loads anything.

import { lexer } from "./marked.js";

const OPTIONS = { gfm: true, breaks: true };
const SAFE = ["http:", "https:", "mailto:"]; // protocols of links that may be clicked

export function rendered(source, write) {
  // Returns a fragment with the elements of `source`. `write(text, at)` returns the nodes for a piece of text. `at` is
  // its place in `source`, or -1 if `source` does not contain it.
  const fragment = document.createDocumentFragment();
  try {
    let end = 0;
    for (const token of lexer(source, OPTIONS)) {
      fragment.append(...block(token, reader(source, end, write)));
      end += token.raw.length;
    }
  } catch {
    fragment.replaceChildren(...write(source, 0)); // nested too deeply
  }
  return fragment;
}

function reader(source, at, write) {
  // Makes a function that writes pieces of text in order. It looks for each line by itself, because code in a list is
  // indented in the source. It searches from the end of the previous line on.
  const leaf = (text) =>
    text.split(/(\n)/).flatMap((line) => {
      const start = line && line !== "\n" ? source.indexOf(line, at) : -1;
      if (start >= 0) at = start + line.length;
      return line ? write(line, start) : [];
    });
  leaf.within = (raw, make) => {
    // Text after `raw` is searched only after it: the address of a link, for example, may contain the same words.
    const begin = source.indexOf(raw, at);
    const nodes = make();
    if (begin >= 0) at = begin + raw.length;
    return nodes;
  };
  return leaf;
}

function blocks(tokens, leaf) {
  return tokens.flatMap((token) => block(token, leaf));
}

function block(token, leaf) {
  switch (token.type) {
    case "space":
      return [];
    case "hr":
      return [element("hr")];
    case "heading":
      return [element(`h${Math.min(token.depth + 2, 6)}`, inlines(token.tokens, leaf))];
    case "paragraph":
      return [element("p", inlines(token.tokens, leaf))];
    case "text":
      return token.tokens ? inlines(token.tokens, leaf) : leaf(token.text);
    case "code":
      return [element("pre", [element("code", leaf(token.text))])];
    case "blockquote":
      return [element("blockquote", blocks(token.tokens, leaf))];
    case "list":
      return [list(token, leaf)];
    case "checkbox":
      return [Object.assign(element("input"), { type: "checkbox", disabled: true, checked: token.checked })];
    case "table":
      return [table(token, leaf)];
    default: // HTML, the definition of a link, and what later versions of marked add
      return [element("p", leaf(token.raw.trim()))];
  }
}

function list(token, leaf) {
  const items = token.items.map((item) => element("li", blocks(item.tokens, leaf)));
  const node = element(token.ordered ? "ol" : "ul", items);
  if (token.ordered) node.start = Number(token.start) || 0;
  return node;
}

function table(token, leaf) {
  const row = (cells, name) =>
    element("tr", cells.map((cell) => {
      const node = element(name, inlines(cell.tokens, leaf));
      if (cell.align) node.style.textAlign = cell.align;
      return node;
    }));
  const head = element("thead", [row(token.header, "th")]);
  return element("table", [head, element("tbody", token.rows.map((cells) => row(cells, "td")))]);
}

function inlines(tokens, leaf) {
  return tokens.flatMap((token) => inline(token, leaf));
}

function inline(token, leaf) {
  switch (token.type) {
    case "strong":
    case "em":
    case "del":
      return [element(token.type, inlines(token.tokens, leaf))];
    case "codespan":
      return [element("code", leaf(token.text))];
    case "br":
      return [element("br")];
    case "link":
      return leaf.within(token.raw, () => link(token.href, inlines(token.tokens, leaf)));
    case "image": // never loaded: a request would tell another server that someone reads this
      return leaf.within(token.raw, () => link(token.href, leaf(token.text || token.href)));
    case "checkbox":
      return block(token, leaf);
    case "text":
    case "escape":
      return token.tokens ? inlines(token.tokens, leaf) : leaf(token.text);
    default: // HTML
      return leaf(token.raw);
  }
}

function link(href, children) {
  if (!SAFE.includes(URL.parse(href)?.protocol)) return children;
  const node = element("a", children);
  return [Object.assign(node, { href, title: href, target: "_blank", rel: "noopener noreferrer nofollow" })];
}

function element(name, children = []) {
  const node = document.createElement(name);
  node.append(...children);
  return node;
}
