// Elements are made once and then only changed where something is different, so that
// focus, selection and screen readers are left alone. Text never becomes markup.

const SVG = "http://www.w3.org/2000/svg";
const SVG_TAGS = new Set(["svg", "polyline", "circle", "line", "title", "path"]);

export function make(tag, attributes = {}, ...children) {
  const element = SVG_TAGS.has(tag) ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value != null) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child != null));
  return element;
}

export function text(element, value) {
  const wanted = String(value ?? "");
  if (element.textContent !== wanted) element.textContent = wanted;
}

export function attribute(element, name, value) {
  if (value == null || value === false) element.removeAttribute(name);
  else if (element.getAttribute(name) !== String(value)) element.setAttribute(name, value === true ? "" : value);
}

export function width(element, share) {
  const wanted = `${(Math.min(1, Math.max(0, share || 0)) * 100).toFixed(1)}%`;
  if (element.style.width !== wanted) element.style.width = wanted;
}

// Bring the children of `parent` in line with `items`: made by `create(item)`, kept by `key(item)`,
// brought up to date by `update(element, item)`.
export function keyed(parent, items, key, create, update) {
  const held = (parent.heldByKey ??= new Map());
  const wanted = new Set();
  let place = parent.firstElementChild;
  for (const item of items) {
    const name = key(item);
    wanted.add(name);
    let element = held.get(name);
    if (!element) {
      element = create(item);
      held.set(name, element);
    }
    update?.(element, item);
    if (element === place) place = place.nextElementSibling;
    else parent.insertBefore(element, place);
  }
  for (const [name, element] of held) {
    if (!wanted.has(name)) {
      element.remove();
      held.delete(name);
    }
  }
}
