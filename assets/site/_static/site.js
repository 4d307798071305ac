// ?answers opens every fold: for a printed sheet with answers
if (new URLSearchParams(location.search).has("answers")) {
  addEventListener("DOMContentLoaded", () => document.querySelectorAll("details").forEach((fold) => { fold.open = true; }));
}
// "(CORE, 7 min)" in a heading, and in the list of contents, becomes a badge
addEventListener("DOMContentLoaded", () => {
  for (const title of document.querySelectorAll("article h2, article h3, .toc-tree a")) {
    const text = [...title.childNodes].find((node) => node.nodeType === Node.TEXT_NODE && /\((CORE|MORE)\b/.test(node.data));
    const found = text?.data.match(/\s*\((CORE|MORE)(?:, (\d+) min)?\)\s*$/);
    if (!found) continue;
    text.data = text.data.slice(0, found.index) + " ";
    const badge = document.createElement("span");
    badge.className = `part ${found[1].toLowerCase()}`;
    badge.textContent = found[2] ? `${found[1]} ${found[2]}'` : found[1];
    text.after(badge);
  }
});
// in a narrow window the menus are labels, which a keyboard does not reach: make them buttons
addEventListener("DOMContentLoaded", () => {
  for (const label of document.querySelectorAll("label.nav-overlay-icon, label.toc-overlay-icon")) {
    label.tabIndex = 0;
    label.setAttribute("role", "button");
    label.setAttribute("aria-label", label.htmlFor === "__toc" ? "Contents of this page" : "All pages");
    label.addEventListener("keydown", (event) => {
      if (event.key === "Enter" || event.key === " ") { event.preventDefault(); label.click(); }
    });
  }
});
