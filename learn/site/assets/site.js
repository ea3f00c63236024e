// Tables that fit every screen, and what Material's scripts leave out for the keyboard and for screen readers.
"use strict";

const ROLES = { TABLE: "table", THEAD: "rowgroup", TBODY: "rowgroup", TR: "row", TH: "columnheader", TD: "cell" };

// A table that is too wide becomes a list of its rows. Each cell gets the name of its column as a label, and keeps the
// role that it would lose with its layout.
function stack() {
  for (const table of document.querySelectorAll("article table")) {
    table.classList.remove("stacked");
    const place = table.closest(".md-typeset__scrollwrap, .formula");
    if (place.scrollWidth <= place.clientWidth + 1) continue;
    const labels = [...table.rows[0].querySelectorAll("th")].map((cell) => cell.textContent.trim());
    for (const part of [table, ...table.querySelectorAll("thead, tbody, tr, th, td")]) part.role = ROLES[part.tagName];
    for (const row of table.rows) {
      [...row.cells].forEach((cell, i) => labels[i] && (cell.dataset.label = labels[i]));
    }
    table.classList.add("stacked");
  }
}

// What scrolls sideways can be reached by Tab, so that arrow keys scroll it.
function reach() {
  for (const part of document.querySelectorAll(".md-typeset__scrollwrap, article pre > code")) {
    if (part.scrollWidth > part.clientWidth) part.tabIndex = 0;
    else part.removeAttribute("tabindex");
  }
}

function fit() {
  stack();
  reach();
}

document.querySelector(".md-search").setAttribute("aria-label", "Search");
window.addEventListener("load", fit); // Material has put tables into frames by then
window.addEventListener("resize", fit);
