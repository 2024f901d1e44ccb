//! What shows each requirement, and which requirements nothing shows.

use std::collections::BTreeMap;
use std::path::Path;

use comfy_table::{Cell, CellAlignment, Table, presets};
use conformance::requirements::{Level, Requirement, Requirements};
use vector_check as vectors;

use super::cases::{self, CaseRequirements};
use super::scan::{MentionKind, Sources};
use super::seen::Seen;

/// What shows one requirement.
#[allow(missing_docs)] // the others are plain
#[derive(Debug, Default)]
pub struct Shown {
    /// Places in the code of the libraries that name it.
    pub code: usize,
    pub tests: Vec<String>,
    pub vectors: Vec<String>,
}

/// The requirements of a workspace, and what shows them.
pub struct Coverage {
    requirements: Requirements,
    shown: BTreeMap<String, Shown>,
    /// Requirements that nothing shows, and ids that name no requirement.
    pub problems: Vec<String>,
}

impl Coverage {
    /// Reads the workspace at `root`, for the requirements of Valkey over RDMA.
    ///
    /// # Errors
    /// Something cannot be read.
    pub fn of(root: &Path) -> Result<Self, String> {
        let files = vectors::Files::read(&root.join("spec/vectors"))?;
        let vectors = files.requirements().map(|(vector, ids)| (vector, ids.to_vec())).collect();
        let seen = Seen::of(&Requirements::of(root)?, &files);
        let mut coverage = Self::over(root, "VR-", Requirements::of(root)?, &cases::all(), vectors)?;
        coverage.problems.extend(seen.problems());
        Ok(coverage)
    }

    /// Reads the sources at `root`, for requirements whose ids begin with `prefix`.
    ///
    /// # Errors
    /// Something cannot be read.
    pub fn over(
        root: &Path,
        prefix: &str,
        requirements: Requirements,
        cases: &[CaseRequirements],
        vectors: Vec<(String, Vec<String>)>,
    ) -> Result<Self, String> {
        let mut sources = Sources::read(root).map_err(|error| format!("{}: {error}", root.display()))?;
        // Ids of another specification are judged with that.
        sources.mentions.retain(|mention| mention.id.starts_with(prefix));
        let mut coverage = Self { requirements, shown: BTreeMap::new(), problems: Vec::new() };
        coverage.add_mentions(&sources);
        for (case, ids) in cases {
            for id in *ids {
                coverage.note(id, case, |shown| shown.tests.push((*case).to_string()));
            }
        }
        for (vector, ids) in vectors {
            for id in ids {
                coverage.note(&id, &vector, |shown| shown.vectors.push(vector.clone()));
            }
        }
        coverage.add_named_tests(&sources, cases);
        coverage.find_gaps();
        Ok(coverage)
    }

    fn note(&mut self, id: &str, at: &str, add: impl FnOnce(&mut Shown)) {
        if self.requirements.has(id) {
            add(self.shown.entry(id.to_string()).or_default());
        } else {
            self.problems.push(format!("{at}: there is no requirement {id}"));
        }
    }

    fn add_mentions(&mut self, sources: &Sources) {
        for mention in &sources.mentions {
            self.note(&mention.id, &mention.at, |shown| match &mention.kind {
                // Suites name the requirements that they test, which they do not meet.
                MentionKind::Code if is_of_a_library(&mention.at) => shown.code += 1,
                MentionKind::Test(test) if !shown.tests.contains(test) => shown.tests.push(test.clone()),
                MentionKind::Code | MentionKind::Test(_) | MentionKind::Table => {}
            });
        }
    }

    fn add_named_tests(&mut self, sources: &Sources, cases: &[CaseRequirements]) {
        for Requirement { id, tests, differs, .. } in self.requirements.iter() {
            for case in differs.iter().flat_map(|differs| &differs.cases) {
                if !cases.iter().any(|(name, about)| name == case && about.contains(&id.as_str())) {
                    self.problems.push(format!("{id}: there is no case {case} about it"));
                }
            }
            for test in tests {
                if !sources.tests.contains(test) && !cases.iter().any(|(case, _)| case == test) {
                    self.problems.push(format!("{id}: there is no test and no case {test}"));
                }
                let shown = self.shown.entry(id.clone()).or_default();
                if !shown.tests.contains(test) {
                    shown.tests.push(test.clone());
                }
            }
        }
    }

    fn find_gaps(&mut self) {
        let gaps: Vec<String> = self
            .requirements
            .iter()
            // `open` lists the others, which are no problem.
            .filter(|one| one.level == Level::Must && self.state(one) == Showing::Open)
            .map(|one| format!("{}: no test, no vector, no reason for neither", one.id))
            .collect();
        self.problems.extend(gaps);
    }

    fn state(&self, requirement: &Requirement) -> Showing {
        match self.shown.get(&requirement.id) {
            Some(shown) if !shown.tests.is_empty() || !shown.vectors.is_empty() => Showing::Shown,
            _ if requirement.untestable.is_some() => Showing::Untestable,
            _ => Showing::Open,
        }
    }

    /// The requirements.
    pub fn requirements(&self) -> impl Iterator<Item = &Requirement> {
        self.requirements.iter()
    }

    /// Returns the tests, vectors and cases that show a requirement.
    pub fn shown(&self, id: &str) -> Option<&Shown> {
        self.shown.get(id)
    }

    /// Returns the counts by area, level, profile and origin.
    pub fn table(&self) -> Table {
        let mut table = suite::terminal::table();
        table.load_preset(presets::UTF8_HORIZONTAL_ONLY);
        table.set_header(["", "all", "shown", "by tests", "by vectors", "untestable", "open"]);
        for column in table.column_iter_mut().skip(1) {
            column.set_cell_alignment(CellAlignment::Right);
        }
        let groups: [fn(&Requirement) -> String; 4] = [
            |requirement| requirement.area().to_string(),
            |requirement| requirement.level.to_string(),
            |requirement| requirement.profile.to_string(),
            |requirement| requirement.origin.to_string(),
        ];
        for name_of in groups {
            let mut names: Vec<String> = Vec::new();
            for name in self.requirements.iter().map(name_of) {
                // In the order of the specification, and not sorted.
                if !names.contains(&name) {
                    names.push(name);
                }
            }
            for name in names {
                self.add_row(&mut table, &name, |requirement| name_of(requirement) == name);
            }
        }
        self.add_row(&mut table, "all", |_| true);
        table
    }

    fn add_row(&self, table: &mut Table, name: &str, is_in: impl Fn(&Requirement) -> bool) {
        let group: Vec<_> = self.requirements.iter().filter(|requirement| is_in(requirement)).collect();
        let count = |test: &dyn Fn(&Requirement) -> bool| group.iter().filter(|one| test(one)).count();
        let has = |requirement: &Requirement, what: fn(&Shown) -> &Vec<String>| {
            self.shown(&requirement.id).is_some_and(|shown| !what(shown).is_empty())
        };
        let counts = [
            group.len(),
            count(&|requirement| self.state(requirement) == Showing::Shown),
            count(&|requirement| has(requirement, |shown| &shown.tests)),
            count(&|requirement| has(requirement, |shown| &shown.vectors)),
            count(&|requirement| self.state(requirement) == Showing::Untestable),
            count(&|requirement| self.state(requirement) == Showing::Open),
        ];
        table.add_row(
            [name.to_string()].into_iter().chain(counts.map(|count| count.to_string())).map(Cell::new),
        );
    }

    /// Returns requirements that nothing shows and that are not musts.
    pub fn open(&self) -> Vec<&Requirement> {
        self.requirements.iter().filter(|requirement| self.state(requirement) == Showing::Open).collect()
    }

    /// Returns requirements that no code names.
    pub fn without_code(&self) -> Vec<&Requirement> {
        let unnamed =
            |requirement: &&Requirement| self.shown(&requirement.id).is_none_or(|shown| shown.code == 0);
        self.requirements.iter().filter(unnamed).collect()
    }
}

fn is_of_a_library(at: &str) -> bool {
    let is_library = at.trim_start_matches("apps/").starts_with("rdma-") || at.starts_with("snapshot/src/");
    is_library && !at.starts_with("rdma-backend/semantics/") && at.contains("/src/") && !at.contains("/tests")
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Showing {
    Shown,
    Untestable,
    Open,
}
