//! What a peer can see of each *must*: by role, its test vectors and the suite's cases.

use std::collections::BTreeMap;
use std::fmt::Write;

use conformance::blackbox::{self, case::Case};
use conformance::requirements::{Level, Requirements, Role};
use rdma_softsim::SoftSim;
use suite::Tag;
use vector_check::Files;

/// Why neither a vector nor a case shows a requirement of a role. `untestable` in
/// `requirements.toml` is a reason for both roles.
const UNSEEN: &[(&str, &[Role], &str)] = &[
    (
        "VR-MEM-019",
        BOTH,
        "what the memory is used for afterwards is its program's business: a peer that writes late cannot see it",
    ),
    (
        "VR-RES-012",
        &[Role::Client],
        "whether a receive was posted before the answer or behind it is a race for the peer: a device of one's own shows it",
    ),
    (
        "VR-SEC-010",
        &[Role::Client],
        "a server whose client gives memory to another connection too early cannot see what it overwrites",
    ),
];
const BOTH: &[Role] = &[Role::Client, Role::Server];
/// How many vectors and cases of a row are named.
const NAMED: usize = 3;

/// A *must* and a role that it binds.
struct Row {
    id: String,
    role: Role,
    vectors: Vec<String>,
    cases: Vec<String>,
    reason: Option<String>,
    /// Tests of this workspace, for a row with a reason.
    tests: Vec<String>,
}

/// The rows of all musts.
pub struct Seen(Vec<Row>);

impl Seen {
    /// Returns a row for each must and role.
    pub fn of(requirements: &Requirements, files: &Files) -> Self {
        let mut vectors: BTreeMap<(&str, &str), Vec<String>> = BTreeMap::new();
        for vector in files.control.iter().flat_map(|(_, file)| &file.vectors) {
            for (id, role) in
                vector.requirements.iter().flat_map(|id| BOTH.iter().map(move |role| (id, *role)))
            {
                vectors.entry((id.as_str(), role.name())).or_default().push(vector.id.clone());
            }
        }
        for trace in files.traces.iter().flat_map(|(_, file)| &file.traces) {
            for id in &trace.requirements {
                vectors.entry((id.as_str(), trace.role.name())).or_default().push(trace.id.clone());
            }
        }
        let cases = blackbox::cases::<SoftSim>();
        let shows = |id: &str, role| {
            let of_role = cases.iter().filter(|case| case.role == Some(role));
            // A page names no case that may do harm (SECURITY.md).
            let name = |case: &Case<'_, SoftSim>| match case.tags.contains(&Tag::Disruptive) {
                true => String::new(),
                false => case.id.to_string(),
            };
            of_role.filter(|case| case.requirements.contains(&id)).map(name).collect()
        };
        let musts = requirements.iter().filter(|one| one.level == Level::Must);
        let rows = musts.flat_map(|one| one.roles.iter().map(move |role| (one, *role)));
        Self(
            rows.map(|(one, role)| Row {
                id: one.id.clone(),
                role,
                vectors: vectors.get(&(&*one.id, role.name())).cloned().unwrap_or_default(),
                cases: shows(&one.id, role),
                reason: reason(&one.id, role).map(str::to_string).or_else(|| one.untestable.clone()),
                tests: one.tests.clone(),
            })
            .collect(),
        )
    }

    /// Returns the rows that show nothing and give no reason, and reasons without such a row.
    pub fn problems(&self) -> Vec<String> {
        let is_seen = |row: &Row| !row.vectors.is_empty() || !row.cases.is_empty();
        let empty = self.0.iter().filter(|row| !is_seen(row) && row.reason.is_none());
        let empty =
            empty.map(|row| format!("{}, {}: no vector, no case, no reason for neither", row.id, row.role));
        let excused = UNSEEN.iter().flat_map(|(id, roles, _)| roles.iter().map(move |role| (*id, *role)));
        let idle = excused.filter(|(id, role)| {
            !self.0.iter().any(|row| row.id == *id && row.role == *role && !is_seen(row))
        });
        empty.chain(idle.map(|(id, role)| format!("{id}, {role}: a reason for what is seen"))).collect()
    }

    /// Returns the page `spec/coverage.md`.
    pub fn page(&self) -> String {
        let mut page = String::from(
            "# What shows each *must*\n\n\
             For each *must* and each role that it binds: the test vectors that show it, and the cases of the conformance suite. Both judge an implementation from\n\
             outside. Where neither can, the last column says why, and names tests of this repository.\n\n\
             Rendered by `valkey-rdma-trust reqs render`. `valkey-rdma-trust reqs coverage` fails if a row is empty and gives no reason.\n\n",
        );
        let count = |is: &dyn Fn(&Row) -> bool| self.0.iter().filter(|row| is(row)).count();
        let (vectors, cases) = (count(&|row| !row.vectors.is_empty()), count(&|row| !row.cases.is_empty()));
        let both = count(&|row| !row.vectors.is_empty() && !row.cases.is_empty());
        let neither = count(&|row| row.vectors.is_empty() && row.cases.is_empty());
        let _ = writeln!(
            page,
            "{} rows: {vectors} with vectors, {cases} with cases, {both} of these with both, {neither} with neither.\n\n\
             | requirement | role | vectors | cases | neither, because |\n|---|---|---|---|---|",
            self.0.len()
        );
        for Row { id, role, vectors, cases, reason, tests } in &self.0 {
            let because = match reason {
                Some(reason) if vectors.is_empty() && cases.is_empty() && tests.is_empty() => reason.clone(),
                Some(reason) if vectors.is_empty() && cases.is_empty() => {
                    format!("{reason}. {}", named(tests, tests.len()))
                }
                _ => String::new(),
            };
            let _ = writeln!(
                page,
                "| {id} | {role} | {} | {} | {because} |",
                named(vectors, NAMED),
                named(cases, NAMED)
            );
        }
        page
    }
}

fn reason(id: &str, role: Role) -> Option<&'static str> {
    let row = UNSEEN.iter().find(|(of, roles, _)| *of == id && roles.contains(&role));
    row.map(|(_, _, reason)| *reason)
}

/// Names up to `most`, and counts the rest and those without a name.
fn named(all: &[String], most: usize) -> String {
    let names = all.iter().filter(|one| !one.is_empty()).take(most);
    let mut shown: Vec<_> = names.map(|one| format!("`{one}`")).collect();
    match (shown.len(), all.len() - shown.len()) {
        (_, 0) => {}
        (0, more) => shown.push(more.to_string()),
        (_, more) => shown.push(format!("{more} more")),
    }
    shown.join(", ")
}
