"use strict";
// The page is whole without this. With it, cases open beside the table, rows are filtered, and two programs are compared; the address
// says what is shown.
const $ = id => document.getElementById(id);
document.documentElement.classList.add("scripted");
$("filters").hidden = false;
const rows = [...document.querySelectorAll(".cases tr.case")];
const choices = ["text", "role", "profile", "verdict", "before", "after"], switches = ["failing", "must"];
const asked = new URLSearchParams(location.search);
for (const name of choices) $(name).value = asked.get(name) || "";
for (const name of switches) $(name).setAttribute("aria-pressed", String(asked.has(name)));
const value = name => $(name).value.toLowerCase();
const pressed = name => $(name).getAttribute("aria-pressed") === "true";

// How well a program did, for a comparison: what was not decided is neither better nor worse than anything.
const ranks = { "pass": 3, "pass-lenient": 2, "fail": 1, "broken": 0 };
function change(row, before, after) {
  const [from, to] = [before, after].map(run => row.querySelector(`td[data-run="${run}"]`)?.dataset.verdict);
  if (from === to) return null;
  if (!from || !to) return "unpaired";
  const ranked = [from, to].map(verdict => ranks[verdict]);
  return ranked.includes(undefined) ? "different" : ranked[1] > ranked[0] ? "better" : "worse";
}

function draw() {
  const query = new URLSearchParams();
  for (const name of choices) if ($(name).value) query.set(name, $(name).value);
  for (const name of switches) if (pressed(name)) query.set(name, "1");
  const search = query.toString();
  history.replaceState(null, "", (search ? "?" + search : location.pathname) + location.hash);

  const comparing = $("before").value && $("after").value && $("before").value !== $("after").value;
  const compared = comparing ? [$("before").value, $("after").value] : null;
  document.querySelectorAll(".cases [data-run]").forEach(cell => { cell.hidden = compared !== null && !compared.includes(cell.dataset.run); });
  document.querySelectorAll(".change").forEach(mark => mark.remove());
  const changes = { better: 0, worse: 0, different: 0, unpaired: 0 };
  let shown = 0;
  for (const row of rows) {
    const cells = [...row.querySelectorAll("td[data-verdict]")].filter(cell => !cell.hidden);
    const verdicts = cells.map(cell => cell.dataset.verdict);
    const changed = compared && change(row, ...compared);
    if (changed === "unpaired" && cells.length > 0) changes.unpaired += 1;
    const of_role = row.closest(".of-role").dataset.role;
    row.hidden = !((value("role") || of_role) === of_role
      && `${row.dataset.words} ${row.textContent}`.toLowerCase().includes(value("text"))
      && (value("profile") || row.dataset.profile) === row.dataset.profile
      && (!value("verdict") || verdicts.includes(value("verdict")))
      && (!pressed("failing") || verdicts.some(verdict => verdict === "fail" || verdict === "broken"))
      && (!pressed("must") || row.dataset.level === "must")
      && (!compared || (changed && changed !== "unpaired")));
    if (row.hidden) continue;
    shown += 1;
    if (!changed) continue;
    changes[changed] += 1;
    const mark = Object.assign(document.createElement("span"), { className: `change ${changed}`, textContent: changed });
    row.querySelector(`td[data-run="${compared[1]}"]`)?.append(mark);
  }
  for (const body of document.querySelectorAll(".cases tbody")) body.hidden = !body.querySelector("tr.case:not([hidden])");
  for (const part of document.querySelectorAll(".of-role")) part.hidden = !part.querySelector("tr.case:not([hidden])");
  $("shown").textContent = compared
    ? `${changes.better} better, ${changes.worse} worse, ${changes.different} otherwise different, ${changes.unpaired} listed for one only`
    : shown ? `${shown} of ${rows.length} cases` : "no case matches";
}
for (const name of choices) $(name).addEventListener("input", draw);
for (const name of switches) $(name).addEventListener("click", () => { $(name).setAttribute("aria-pressed", String(!pressed(name))); draw(); });

// A case stands in the drawer while the address names it, so that Back closes it and a link opens it.
const drawer = $("drawer"), home = $("details");
let opener = null;
function follow() {
  const wanted = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  const shown = drawer.querySelector(".detail");
  if (shown && shown !== wanted) home.append(shown);
  document.querySelectorAll("tr.open").forEach(row => row.classList.remove("open"));
  if (!wanted?.classList.contains("detail")) {
    if (drawer.open) drawer.close();
    if (wanted) wanted.scrollIntoView();
    return;
  }
  opener = rows.map(row => row.querySelector("a")).find(link => link.hash.slice(1) === wanted.id);
  opener.closest("tr").classList.add("open");
  drawer.append(wanted);
  drawer.setAttribute("aria-labelledby", `${wanted.id}-name`);
  if (!drawer.open) drawer.showModal();
  drawer.scrollTop = 0;
}
addEventListener("hashchange", follow);
drawer.addEventListener("close", () => {
  const shown = drawer.querySelector(".detail");
  if (!shown) return;
  home.append(shown);
  document.querySelectorAll("tr.open").forEach(row => row.classList.remove("open"));
  if (location.hash.slice(1) === shown.id) history.replaceState(null, "", location.pathname + location.search);
  opener?.focus();
});
drawer.addEventListener("click", event => { if (event.target === drawer) drawer.close(); });
$("close").addEventListener("click", () => drawer.close());
for (const row of rows) row.addEventListener("click", event => {
  if (!event.target.closest("a") && !String(getSelection())) row.querySelector("a").click();
});
draw();
follow();
