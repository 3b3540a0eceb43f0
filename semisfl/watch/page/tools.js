"use strict";
// Shared by all other scripts: elements, numbers as text, and requests for data.
// What a run's directory holds becomes the text of a node, never markup.
window.Watch = (() => {
  function el(tag, attributes = {}, ...children) {
    const node = document.createElement(tag);
    for (const [key, value] of Object.entries(attributes)) {
      if (value === null || value === undefined || value === false) continue;
      if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
      else node.setAttribute(key, value === true ? "" : value);
    }
    node.append(...children.flat().filter((child) => child !== null && child !== undefined));
    return node;
  }

  const NONE = "–";
  const format = {
    percent: (value) => (value == null ? NONE : `${value.toFixed(1)} %`),
    share: (value) => (value == null ? NONE : `${(100 * value).toFixed(1)} %`),
    count: (value) => (value == null ? NONE : value.toLocaleString("en")),
    bytes(value) {
      if (value == null) return NONE;
      let unit = 0;
      const units = ["B", "kB", "MB", "GB", "TB"];
      while (value >= 1000 && unit < units.length - 1) { value /= 1000; unit += 1; }
      return `${unit ? Number(value.toPrecision(3)) : value} ${units[unit]}`;
    },
    time(seconds) {
      if (seconds == null) return NONE;
      const whole = Math.round(seconds);
      const parts = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60, whole % 60];
      const [hours, minutes, rest] = parts.map((part) => String(part).padStart(2, "0"));
      return parts[0] ? `${parts[0]}:${minutes}:${rest}` : `${parts[1]}:${rest}`;
    },
    ago(seconds) {
      if (seconds < 90) return `${Math.max(0, Math.round(seconds))} s ago`;
      if (seconds < 5400) return `${Math.round(seconds / 60)} min ago`;
      if (seconds < 129600) return `${Math.round(seconds / 3600)} h ago`;
      return `${Math.round(seconds / 86400)} days ago`;
    },
  };

  // The charts' library reads a little markup in texts: none of it may come from a run.
  const plain = (text) =>
    String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");

  const inlined = document.getElementById("data");
  const stored = inlined ? JSON.parse(inlined.textContent) : null;

  async function ask(view, question = {}) {
    if (stored) {
      const answer = stored[view];
      return question.run ? answer[question.run] : answer;
    }
    const response = await fetch(`api/${view}?${new URLSearchParams(question)}`);
    if (!response.ok) throw new Error(`${response.status}: ${await response.text()}`);
    return response.json();
  }

  // The fragment of a view, of one run if there is one.
  const link = (view, run) => (run ? `#${view}/${encodeURIComponent(run)}` : `#${view}`);

  return { el, format, plain, ask, link, live: !stored, data: { listing: null, rounds: {} } };
})();
