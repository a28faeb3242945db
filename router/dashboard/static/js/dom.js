/** Elements made of plain values. Text goes in as text: what prompts say is never read as markup. */

const SVG = "http://www.w3.org/2000/svg";

export function el(tag, attributes = {}, ...children) {
  return furnished(document.createElement(tag), attributes, children);
}

export function svg(tag, attributes = {}, ...children) {
  return furnished(document.createElementNS(SVG, tag), attributes, children);
}

/** Attributes by their names; `on` takes listeners, and `style` goes past the policy that forbids style attributes. */
function furnished(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "on") {
      for (const [event, listener] of Object.entries(value)) node.addEventListener(event, listener);
    } else if (name === "style") {
      for (const [property, text] of Object.entries(value)) node.style.setProperty(property, text);
    } else {
      node.setAttribute(name, value === true ? "" : value);
    }
  }
  node.append(...present(children));
  return node;
}

/** In the place of all that was there. */
export function fill(node, ...children) {
  node.replaceChildren(...present(children));
  return node;
}

/** Touches the page only where something is new. */
export function say(node, text) {
  const words = String(text);
  if (node.textContent !== words) node.textContent = words;
}

export function mark(node, name, value) {
  if (value === null || value === undefined || value === false) node.removeAttribute(name);
  else if (node.getAttribute(name) !== String(value)) node.setAttribute(name, value === true ? "" : value);
}

function present(children) {
  return children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false);
}

export function announce(text) {
  say(document.getElementById("announcer"), text);
}
