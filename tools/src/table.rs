//! Tables as plain text and as Markdown: the first columns to the left, numbers to the right.

pub struct Table {
    rows: Vec<Vec<String>>,
    left: usize,
}

impl Table {
    /// `left` columns are aligned to the left.
    pub fn new(header: &[&str], left: usize) -> Table {
        Table { rows: vec![header.iter().map(|h| h.to_string()).collect()], left }
    }

    pub fn row(&mut self, cells: Vec<String>) {
        self.rows.push(cells);
    }

    pub fn markdown(&self) -> String {
        let line = |cells: &[String]| format!("| {} |\n", cells.join(" | "));
        let columns = self.rows[0].len();
        let rules: Vec<String> = (0..columns).map(|c| if c < self.left { "---" } else { "---:" }.into()).collect();
        let rows: String = self.rows[1..].iter().map(|row| line(row)).collect();
        format!("{}{}{rows}", line(&self.rows[0]), line(&rules))
    }
}

/// A share in percent, without decimals.
pub fn percent(part: usize, all: usize) -> String {
    format!("{:.0}", 100.0 * part as f64 / all.max(1) as f64)
}

impl std::fmt::Display for Table {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let width = |cell: &String| cell.chars().count();
        let columns = self.rows.iter().map(Vec::len).max().unwrap_or(0);
        let widths: Vec<usize> =
            (0..columns).map(|c| self.rows.iter().filter_map(|r| r.get(c)).map(width).max().unwrap_or(0)).collect();
        for row in &self.rows {
            let mut line = String::new();
            for (c, cell) in row.iter().enumerate() {
                let pad = " ".repeat(widths[c] - width(cell));
                let gap = if c == 0 { "" } else { "  " };
                line += &if c < self.left { format!("{gap}{cell}{pad}") } else { format!("{gap}{pad}{cell}") };
            }
            writeln!(f, "{}", line.trim_end())?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_line_up() {
        let mut t = Table::new(&["K/V", "bits"], 1);
        t.row(vec!["f16".into(), "16.00".into()]);
        t.row(vec!["srft4".into(), "4.5".into()]);
        assert_eq!(t.to_string(), "K/V     bits\nf16    16.00\nsrft4    4.5\n");
        assert_eq!(t.markdown(), "| K/V | bits |\n| --- | ---: |\n| f16 | 16.00 |\n| srft4 | 4.5 |\n");
    }
}
