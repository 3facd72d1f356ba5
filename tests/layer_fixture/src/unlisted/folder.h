// Planted: a folder that the table does not know.
#pragma once
