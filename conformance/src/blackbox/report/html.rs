//! One page with everything, from the templates in `templates/`. It is complete without
//! JavaScript, which only filters, compares and opens the drawer.

use std::fmt;

use askama::Template;

use super::day;
use crate::blackbox::results::{CaseResult, Run, Teardown};
use crate::requirements::{Level, Profile, Requirement, Requirements, Role};
use intercept::trace::sequence;
use suite::{Cause, Verdict};

/// The prefixes of cases' ids, with the areas of requirements and their titles.
const AREAS: [(&str, &str, &str); 10] = [
    ("conn", "CONN", "Connections"),
    ("ctrl", "CTRL", "Control messages"),
    ("feat", "FEAT", "Features"),
    ("mem", "MEM", "Windows"),
    ("xfer", "XFER", "Payload"),
    ("flow", "FLOW", "Flow control"),
    ("keep", "KEEP", "Keepalive"),
    ("close", "CLOSE", "Ends"),
    ("res", "RES", "Resources"),
    ("sec", "SEC", "Memory"),
];

/// Returns the page. `spec` is the specification's address, for links; without it, they stay here.
///
/// # Errors
/// None is known.
pub fn html(runs: &[Run], spec: Option<&str>) -> Result<String, String> {
    let all = Requirements::built_in();
    let rows = rows(runs);
    let page = Page {
        cases: rows.len(),
        requirements: all.iter().count(),
        version: runs.first().map_or("", |run| &run.suite.version),
        date: runs.iter().map(|run| day(run.begun)).max().unwrap_or_default(),
        spec,
        runs: runs.iter().map(Card::new).collect(),
        causes: runs.iter().enumerate().map(Causes::new).filter(|causes| !causes.groups.is_empty()).collect(),
        areas: AREAS.iter().map(|area| Area::new(area, runs)).collect(),
        verdicts: Verdict::ALL.map(Verdict::name),
        tables: [Role::Server, Role::Client]
            .iter()
            .filter_map(|role| Table::new(*role, runs, &rows))
            .collect(),
        asked: AREAS.iter().map(|area| Asked::new(area, runs, &all, spec)).collect(),
        details: rows.iter().map(|row| Detail::new(row, runs, &all)).collect(),
    };
    page.render().map_err(|error| error.to_string())
}

struct Row<'a> {
    role: Role,
    sample: &'a CaseResult,
    cells: Vec<Option<&'a CaseResult>>,
}

impl Row<'_> {
    fn key(&self) -> String {
        format!("{}-{}", self.role, self.sample.id)
    }
}

/// Returns the cases of all runs. The order is that of the runs that list every case.
fn rows(runs: &[Run]) -> Vec<Row<'_>> {
    let mut rows: Vec<Row<'_>> = Vec::new();
    let (whole, partly): (Vec<_>, Vec<_>) =
        runs.iter().enumerate().partition(|(_, run)| run.withheld.is_none());
    for (number, run) in whole.into_iter().chain(partly) {
        let role = run.target.role;
        for result in &run.results {
            let known = rows.iter().position(|row| row.role == role && row.sample.id == result.id);
            let at = known.unwrap_or_else(|| {
                rows.push(Row { role, sample: result, cells: vec![None; runs.len()] });
                rows.len() - 1
            });
            rows[at].cells[number] = Some(result);
        }
    }
    rows
}

#[derive(Template)]
#[template(path = "report.html")]
struct Page<'a> {
    cases: usize,
    requirements: usize,
    version: &'a str,
    date: String,
    spec: Option<&'a str>,
    runs: Vec<Card<'a>>,
    causes: Vec<Causes<'a>>,
    areas: Vec<Area>,
    verdicts: [&'static str; 9],
    tables: Vec<Table<'a>>,
    asked: Vec<Asked<'a>>,
    details: Vec<Detail<'a>>,
}

struct Card<'a> {
    name: &'a str,
    role: Role,
    backend: &'a str,
    took: String,
    date: String,
    scores: [String; 2],
    parts: Vec<Part>,
    withheld: Option<&'static str>,
    machine: Option<String>,
}

struct Part {
    kind: &'static str,
    name: &'static str,
    count: usize,
}

impl<'a> Card<'a> {
    fn new(run: &'a Run) -> Self {
        let known = run.results.iter().filter(|result| result.expected.is_some()).count();
        let mut parts = vec![
            Part { kind: "known", name: "known failures", count: known },
            Part { kind: "withheld", name: "cases withheld", count: run.withheld() },
        ];
        parts.extend(Verdict::ALL.map(|verdict| {
            let excused =
                run.results.iter().filter(|result| result.expected.is_some() && result.verdict == verdict);
            Part { kind: verdict.name(), name: verdict.name(), count: run.count(verdict) - excused.count() }
        }));
        // Passed cases first.
        parts.rotate_left(2);
        parts.retain(|part| part.count > 0);
        let machine = run.environment.as_ref().map(|machine| {
            let devices = match &machine.devices[..] {
                [] => "no RDMA device of the kernel's".into(),
                devices => devices.join(", "),
            };
            let libraries = machine.libraries.join(", ");
            let of = [&*machine.kernel, &*devices, &*libraries].map(str::to_string);
            let of: Vec<_> = of.into_iter().filter(|one| !one.is_empty()).collect();
            format!("{}; {} processors, load {:.1}", of.join("; "), machine.processors, machine.load)
        });
        Self {
            name: &run.target.name,
            role: run.target.role,
            backend: &run.target.backend,
            took: format!("{:.1}", run.took),
            date: day(run.begun),
            scores: run.scores().map(|score| score.to_string()),
            parts,
            withheld: run.says_of_withheld(),
            machine,
        }
    }
}

struct Causes<'a> {
    name: &'a str,
    role: Role,
    groups: Vec<CauseGroup<'a>>,
}

struct CauseGroup<'a> {
    first: Cell<'a>,
    expected: Option<&'a str>,
    cases: Vec<(String, &'a str)>,
}

impl<'a> Causes<'a> {
    fn new((number, run): (usize, &'a Run)) -> Self {
        let failed = run.results.iter().filter(|result| result.verdict == Verdict::Fail).collect();
        let role = run.target.role;
        let mut groups: Vec<_> = super::alike(failed)
            .into_iter()
            .map(|group| CauseGroup {
                first: Cell::new(number, run, group[0]),
                expected: group[0].expected.as_deref(),
                cases: group.iter().map(|one| (format!("{role}-{}", one.id), one.id.as_str())).collect(),
            })
            .collect();
        groups.sort_by_key(|group| std::cmp::Reverse(group.cases.len()));
        Self { name: &run.target.name, role, groups }
    }
}

struct Score<'a> {
    name: &'a str,
    passed: usize,
    failed: usize,
    /// Passed cases are not listed, so their number would reveal the others.
    partly: bool,
}

impl<'a> Score<'a> {
    fn of(run: &'a Run, about: impl Fn(&CaseResult) -> bool) -> Self {
        let count = |wanted: fn(Verdict) -> bool| {
            run.results.iter().filter(|result| wanted(result.verdict) && about(result)).count()
        };
        Self {
            name: &run.target.name,
            passed: count(Verdict::is_pass),
            failed: count(|verdict| verdict == Verdict::Fail),
            partly: run.withheld.is_some(),
        }
    }

    const fn is_none(&self) -> bool {
        self.passed + self.failed == 0
    }

    const fn kind(&self) -> &'static str {
        if self.failed > 0 { "fail" } else { "pass" }
    }
}

impl fmt::Display for Score<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self { partly: true, failed: 0, .. } => f.write_str("not listed"),
            Self { partly: true, failed, .. } => write!(f, "{failed} failed"),
            Self { passed, failed, .. } if passed + failed == 0 => f.write_str("–"),
            Self { passed, failed, .. } => write!(f, "{passed} of {}", passed + failed),
        }
    }
}

struct Area {
    title: &'static str,
    scores: Vec<String>,
}

impl Area {
    fn new(&(prefix, _, title): &(&str, &str, &'static str), runs: &[Run]) -> Self {
        let score = |run| Score::of(run, |result| area(&result.id) == prefix).to_string();
        Self { title, scores: runs.iter().map(score).collect() }
    }
}

fn area(id: &str) -> &str {
    id.split('.').next().unwrap_or_default()
}

struct Table<'a> {
    role: Role,
    columns: Vec<Heading<'a>>,
    groups: Vec<Group<'a>>,
}

struct Heading<'a> {
    number: usize,
    name: &'a str,
    backend: &'a str,
}

struct Group<'a> {
    title: String,
    cases: Vec<Line<'a>>,
}

struct Line<'a> {
    key: String,
    id: &'a str,
    intent: &'a str,
    profile: Profile,
    level: Level,
    words: String,
    cells: Vec<Option<Cell<'a>>>,
}

struct Cell<'a> {
    number: usize,
    name: &'a str,
    verdict: Verdict,
    kind: &'static str,
    label: String,
    teardown: &'static str,
    reason: &'a str,
    hint: Option<&'a str>,
}

impl<'a> Cell<'a> {
    fn new(number: usize, run: &'a Run, result: &'a CaseResult) -> Self {
        let verdict = result.verdict;
        let mark = match verdict {
            Verdict::Pass | Verdict::PassLenient => "✓",
            Verdict::Fail => "✗",
            Verdict::Broken => "!",
            Verdict::Inconclusive => "?",
            Verdict::Informational => "i",
            Verdict::Unsupported | Verdict::NotApplicable | Verdict::Skipped => "–",
        };
        let known = if result.expected.is_some() { "known " } else { "" };
        let teardown = result.teardown.filter(|teardown| *teardown != Teardown::Clean);
        Self {
            number,
            name: &run.target.name,
            verdict,
            kind: if known.is_empty() { verdict.name() } else { "known" },
            label: format!("{mark} {known}{verdict}"),
            teardown: teardown.map_or("", Teardown::name),
            reason: &result.reason,
            hint: result.hint.as_deref(),
        }
    }
}

impl<'a> Table<'a> {
    fn new(role: Role, runs: &'a [Run], rows: &[Row<'a>]) -> Option<Self> {
        let columns: Vec<_> = runs.iter().enumerate().filter(|(_, run)| run.target.role == role).collect();
        let line = |row: &Row<'a>| Line {
            key: row.key(),
            id: &row.sample.id,
            intent: &row.sample.intent,
            profile: row.sample.profile,
            level: row.sample.level,
            words: [&row.sample.requirements[..], &row.sample.tags[..]].concat().join(" "),
            cells: columns
                .iter()
                .map(|(number, run)| row.cells[*number].map(|result| Cell::new(*number, run, result)))
                .collect(),
        };
        let mut groups: Vec<Group<'a>> = Vec::new();
        for profile in Profile::ALL {
            for row in rows.iter().filter(|row| row.role == role && row.sample.profile == profile) {
                let prefix = area(&row.sample.id);
                let area =
                    AREAS.iter().find(|(one, ..)| *one == prefix).map_or(prefix, |(_, _, title)| title);
                let title = format!("{}: {area}", profile.title());
                match groups.last_mut() {
                    Some(group) if group.title == title => group.cases.push(line(row)),
                    _ => groups.push(Group { title, cases: vec![line(row)] }),
                }
            }
        }
        let heading = |&(number, run): &(usize, &'a Run)| Heading {
            number,
            name: &run.target.name,
            backend: &run.target.backend,
        };
        let columns: Vec<_> = columns.iter().map(heading).collect();
        (!columns.is_empty()).then_some(Self { role, columns, groups })
    }
}

struct Asked<'a> {
    title: &'static str,
    requirements: Vec<Requested<'a>>,
}

struct Requested<'a> {
    requirement: Requirement,
    link: Option<String>,
    scores: Vec<Score<'a>>,
}

impl<'a> Asked<'a> {
    fn new(
        &(_, area, title): &(&str, &str, &'static str),
        runs: &'a [Run],
        all: &Requirements,
        spec: Option<&str>,
    ) -> Self {
        let requested = |requirement: &Requirement| {
            let id = &requirement.id;
            Requested {
                requirement: requirement.clone(),
                link: spec.map(|spec| format!("{spec}/requirements.md#{}", id.to_lowercase())),
                scores: runs
                    .iter()
                    .map(|run| Score::of(run, |result| result.requirements.contains(id)))
                    .collect(),
            }
        };
        let requirements = all.iter().filter(|one| one.area() == area).map(requested).collect();
        Self { title, requirements }
    }
}

struct Detail<'a> {
    key: String,
    id: &'a str,
    role: Role,
    kind: String,
    intent: &'a str,
    expectation: &'a str,
    got: Vec<Got<'a>>,
    requirements: Vec<(&'a str, String)>,
}

struct Got<'a> {
    cell: Cell<'a>,
    teardown: &'static str,
    expected: Option<&'a str>,
    cause: Option<&'static str>,
    repro: &'a str,
    wire: Vec<sequence::Page>,
}

impl<'a> Detail<'a> {
    fn new(row: &Row<'a>, runs: &'a [Run], all: &Requirements) -> Self {
        let CaseResult { id, intent, expectation, requirements, level, profile, tags, .. } = row.sample;
        let tags = if tags.is_empty() { String::new() } else { format!("; {}", tags.join(", ")) };
        let got = |(number, (run, result)): (usize, (&'a Run, &Option<&'a CaseResult>))| {
            let result = (*result)?;
            Some(Got {
                cell: Cell::new(number, run, result),
                teardown: result.teardown.map_or("", Teardown::name),
                expected: result.expected.as_deref(),
                cause: result.cause.filter(|cause| *cause != Cause::Requirement).map(Cause::name),
                repro: &result.repro,
                wire: result.timeline.as_deref().map(sequence::read).unwrap_or_default(),
            })
        };
        let text = |id: &str| all.get(id).map(|one| one.text.clone()).unwrap_or_default();
        Self {
            key: row.key(),
            id,
            role: row.role,
            kind: format!("{}, {}, {level}{tags}", row.role, profile.title()),
            intent,
            expectation,
            got: runs.iter().zip(&row.cells).enumerate().filter_map(got).collect(),
            requirements: requirements.iter().map(|id| (id.as_str(), text(id))).collect(),
        }
    }
}
