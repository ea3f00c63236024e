// What Material's scripts leave out for the keyboard and for screen readers.
"use strict";

// What scrolls sideways can be reached by Tab, so that arrow keys scroll it.
function reachable() {
  for (const part of document.querySelectorAll(".md-typeset__scrollwrap, .beside pre:not(:has(> code))")) {
    if (part.scrollWidth > part.clientWidth) part.tabIndex = 0;
    else part.removeAttribute("tabindex");
  }
}

document.querySelector(".md-search").setAttribute("aria-label", "Search");
window.addEventListener("load", reachable); // Material has put tables into frames by then
window.addEventListener("resize", reachable);
