/** Light or dark: as the system says, until somebody chooses. */

import { mark, say } from "./dom.js";

const STORED = "warmroute.theme";
const CHOICES = ["auto", "light", "dark"];
const NAMES = { auto: "\u25d0 Auto", light: "\u25cb Light", dark: "\u25cf Dark" };

export function themed(button) {
  let chosen = localStorage.getItem(STORED);
  if (!CHOICES.includes(chosen)) chosen = "auto";
  const show = () => {
    mark(document.documentElement, "data-theme", chosen === "auto" ? null : chosen);
    say(button, NAMES[chosen]);
    mark(button, "aria-label", `${NAMES[chosen].slice(2)} colours`);
    mark(button, "title", "Colours: as the system has them, light, or dark");
  };
  button.addEventListener("click", () => {
    chosen = CHOICES[(CHOICES.indexOf(chosen) + 1) % CHOICES.length];
    localStorage.setItem(STORED, chosen);
    show();
  });
  show();
}
