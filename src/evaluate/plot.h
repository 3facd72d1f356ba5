// A plot of rates against length, as SVG.
#pragma once

#include <string>
#include <vector>

#include "evaluate/bootstrap.h"

namespace bifocal {

struct PlotPoint {
  double x = 0.0;  // above 0
  double y = 0.0;  // a share, with its interval
  Interval interval;
};

struct PlotSeries {
  std::string name;
  std::vector<PlotPoint> points;  // ascending x
};

struct Plot {
  std::string title;
  std::string x_label;
  std::string y_label;
  std::vector<PlotSeries> series;
};

// Lines, markers and interval bars of every series on shared axes: x logarithmic where it spans
// more than a factor of 10, y in percent from 0. A standalone SVG document; the same bytes for the
// same plot. Throws Error for a plot without points.
std::string plot_svg(const Plot& plot);

}  // namespace bifocal
