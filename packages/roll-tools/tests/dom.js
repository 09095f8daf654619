// The part of a browser that the pages' scripts use. `build` makes the document from the nested lists of `Tree`.
const MATCH = /^([a-z]*)((?:\.[\w-]+)*)(?:\[([\w-]+)=([\w-]+)\])?(?::not\(\.([\w-]+)\))?$/;

class Node {
  constructor(tag) {
    Object.assign(this, { tagName: tag, attributes: {}, childNodes: [], parent: null, listeners: {}, style: {}, hidden: false, disabled: false, value: "" });
    this.dataset = new Proxy(this.attributes, {
      get: (all, name) => all[`data-${name}`],
      set: (all, name, value) => { all[`data-${name}`] = String(value); return true; },
    });
  }
  get className() { return this.attributes.class ?? ""; }
  set className(value) { this.attributes.class = value; }
  get children() { return this.childNodes.filter((e) => e instanceof Node); }
  get textContent() { return this.childNodes.map((e) => e instanceof Node ? e.textContent : e).join(""); }
  set textContent(text) { this.childNodes = [String(text)]; }
  getAttribute(name) { return this.attributes[name] ?? null; }
  setAttribute(name, value) { this.attributes[name] = String(value); }
  append(...nodes) {
    for (const node of nodes) {
      if (node instanceof Node) { node.remove(); node.parent = this; }
      this.childNodes.push(node instanceof Node ? node : String(node));
    }
  }
  replaceChildren(...nodes) { this.childNodes = []; this.append(...nodes); }
  remove() {
    if (this.parent) this.parent.childNodes = this.parent.childNodes.filter((e) => e !== this);
    this.parent = null;
  }
  matches(selectors) {
    return selectors.split(",").some((selector) => {
      const found = MATCH.exec(selector.trim());
      if (!found) throw new Error(`the document of the tests has no selector ${selector}`);
      const [, tag, classes, name, value, not] = found, own = this.className.split(" ");
      return (!tag || tag === this.tagName) && classes.split(".").filter(Boolean).every((c) => own.includes(c))
        && (!name || this.attributes[name] === value) && (!not || !own.includes(not));
    });
  }
  querySelectorAll(selectors) {
    return this.children.flatMap((e) => [...(e.matches(selectors) ? [e] : []), ...e.querySelectorAll(selectors)]);
  }
  querySelector(selectors) { return this.querySelectorAll(selectors)[0] ?? null; }
  getBoundingClientRect() { return { left: 0, top: 0, width: 440, height: 200 }; }
  addEventListener(type, listener) { (this.listeners[type] ??= []).push(listener); }
  dispatch(type, given = {}) {
    const event = { type, prevented: false, preventDefault() { this.prevented = true; }, ...given };
    for (const listener of [this[`on${type}`], ...(this.listeners[type] ?? [])]) if (listener) listener.call(this, event);
    return event.prevented;
  }
}

class Option extends Node {
  constructor(text, value) { super("option"); this.textContent = text; this.value = String(value); }
}

const build = ([tag, attributes, children]) => {
  const node = new Node(tag);
  Object.assign(node.attributes, attributes);
  for (const name of ["value", "max", "min", "type"]) if (name in attributes) node[name] = attributes[name];
  node.append(...children.map((e) => typeof e === "string" ? e : build(e)));
  return node;
};
const root = build(JSON.parse(PAGE)), stored = {};
const document = {
  documentElement: root,
  getElementById: (id) => document.querySelectorAll("").find((e) => e.attributes.id === id) ?? null,
  querySelectorAll: (selectors) => root.querySelectorAll(selectors),
  createElement: (tag) => new Node(tag),
  createElementNS: (space, tag) => new Node(tag),
};
const localStorage = { getItem: (name) => stored[name] ?? null, setItem: (name, value) => { stored[name] = value; } };
const matchMedia = (query) => ({ matches: DARK && query.includes("dark") });
const windowListeners = {};
const addEventListener = (type, listener) => { windowListeners[type] = listener; };
Array.prototype.findLastIndex ??= function (test) { for (let i = this.length - 1; i >= 0; i -= 1) if (test(this[i])) return i; return -1; };
