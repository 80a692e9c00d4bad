// The frame: four rooms behind tabs, the language, the colours. The address says which room: #grid, #train ...

import { language, setLanguage, text } from "./texts.js";
import { button, h } from "./dom.js";
import { gridRoom } from "./grid.js";
import { clipRoom } from "./clip.js";
import { answersRoom } from "./answers.js";
import { getPool, ownSteps, trainRoom } from "./train.js";

const ROOMS = {
  grid: gridRoom, clip: clipRoom,
  answers: (place) => answersRoom(place, getPool, ownSteps),
  train: trainRoom,
};

function render() {
  const names = Object.keys(ROOMS), asked = location.hash.slice(1), room = names.includes(asked) ? asked : names[0];
  document.documentElement.lang = language() === "zh" ? "zh-Hant-TW" : "en";
  document.title = text("title");
  const place = h("main", { role: "tabpanel", id: "room", "aria-labelledby": `tab_${room}` });
  const tabs = names.map((name, i) => h("button", {
    type: "button", role: "tab", id: `tab_${name}`, "aria-selected": String(name === room), "aria-controls": "room",
    tabindex: name === room ? 0 : -1,
    onclick: () => { location.hash = name; },
    onkeydown: ({ key }) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[key];
      if (step) location.hash = names[(i + step + names.length) % names.length];
    },
  }, `${i + 1}. ${text(`tab_${name}`)}`));
  const focused = document.activeElement?.id;
  document.getElementById("page").replaceChildren(
    h("header", {}, h("h1", {}, text("title")),
      button(text("other_language"), () => { setLanguage(language() === "zh" ? "en" : "zh"); render(); }, { id: "language", lang: language() === "zh" ? "en" : "zh-Hant-TW" }),
      button(text("theme"), () => {
        const dark = getComputedStyle(document.documentElement).colorScheme === "dark"
          || (!document.documentElement.dataset.theme && matchMedia("(prefers-color-scheme: dark)").matches);
        document.documentElement.dataset.theme = dark ? "light" : "dark";
      }, { id: "theme" })),
    h("p", {}, text("about")),
    h("div", { role: "tablist", "aria-label": text("rooms") }, tabs), place,
    h("footer", {}, h("p", {}, text("needs")), h("p", {}, text("source"))));
  if (focused?.startsWith("tab_")) document.getElementById(`tab_${room}`).focus();
  else if (focused) document.getElementById(focused)?.focus();
  ROOMS[room](place);
}

addEventListener("hashchange", render);
render();
