// Elements, controls and numbers as text.
"use strict";

function el(name, properties = {}, ...children) {
  const element = document.createElement(name);
  set(element, properties);
  element.append(...children);
  return element;
}

function svg(name, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  set(element, attributes);
  element.append(...children);
  return element;
}

function set(element, properties) {
  for (const [key, value] of Object.entries(properties)) {
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (value === true) element.setAttribute(key, "");
    else if (value !== false && value != null) element.setAttribute(key, value);
  }
}

function fill(id, ...children) {
  const element = document.getElementById(id);
  element.replaceChildren(...children);
  return element;
}

// A radio button drawn by its label.
function radio(group, value, checked, content, choose, properties = {}) {
  const input = el("input", { type: "radio", name: group, value, checked, onchange: () => choose(value), ...properties });
  return el("label", { class: "radio" }, input, el("span", {}, ...content));
}

// Put radio buttons behind the legend of a fieldset. What is chosen stays so where the values stay.
function radios(id, buttons) {
  const fieldset = document.getElementById(id);
  fieldset.replaceChildren(fieldset.querySelector("legend"), ...buttons);
}

function slider(label, { min, max, step, value, hint }, text, change) {
  const shown = el("output", {}, text(value));
  const input = el("input", {
    type: "range", min, max, step, value, "aria-label": label, "aria-valuetext": text(value),
    oninput: () => {
      shown.textContent = text(Number(input.value));
      input.setAttribute("aria-valuetext", shown.textContent);
      change(Number(input.value));
    },
  });
  return el("label", { class: "slider" }, el("span", {}, label), shown, input, hint ? el("small", {}, hint) : "");
}

// A token as it can be seen: spaces and line breaks have signs.
function token(text) {
  return text.replaceAll(" ", "␣").replaceAll("\n", "⏎").replaceAll("\t", "⇥") || "∅";
}

// A number with four digits, as 0.01234 or 1.234 × 10⁻⁹.
function number(value, digits = 4) {
  if (value == null || Number.isNaN(value)) return "not finite";
  if (value === 0) return "0";
  const exponent = Math.floor(Math.log10(Math.abs(value)));
  const signed = (text) => text.replace("-", "−");
  if (exponent >= -3 && exponent < 6) return signed(Number(value.toPrecision(digits)).toString());
  const superscript = [...String(exponent)].map((c) => (c === "-" ? "⁻" : "⁰¹²³⁴⁵⁶⁷⁸⁹"[c])).join("");
  return `${signed((value / 10 ** exponent).toPrecision(2))} × 10${superscript}`;
}

function percent(share) {
  if (share == null) return "not finite";
  return `${(100 * share).toFixed(share > 0 && share < 0.0995 ? 1 : 0)} %`;
}

function amount(value, unit) {
  const thousands = Math.min(4, Math.floor(Math.log10(Math.max(value, 1)) / 3));
  return `${Number((value / 1000 ** thousands).toPrecision(3))} ${["", "k", "M", "G", "T"][thousands]}${unit}`;
}

function time(seconds) {
  return seconds < 1e-3 ? `${Math.round(seconds * 1e6)} µs` : `${Number((seconds * 1e3).toPrecision(3))} ms`;
}

// Axes with their lengths: "heads 4 × head_dim 32".
function axes(names, shape) {
  return names.map((name, i) => `${name} ${shape[i]}`).join(" × ");
}
