"""Stands in for the build backend of a source archive that is only downloaded.

pip asks the backend for the metadata even then. Its own would be installed first, in versions that nobody pinned, and would
run the package. This one copies what the archive says about itself.
"""

import email
import os
import shutil
import sys


def prepare_metadata_for_build_wheel(folder, settings=None):
    with open("PKG-INFO", encoding="utf-8", errors="replace") as file:
        about = email.message_from_file(file)
    info = "%s-%s.dist-info" % (about["Name"].replace("-", "_"), about["Version"])
    os.mkdir(os.path.join(folder, info))
    shutil.copy("PKG-INFO", os.path.join(folder, info, "METADATA"))
    return info


# What pip asks for where a package names no backend: setuptools.build_meta:__legacy__
__legacy__ = sys.modules[__name__]
